// The tree of a round: what was speculated, and the path that was accepted. A column is a depth; siblings are below each
// other, likeliest first. A chain is a tree with one child per node: a line.
//
//   ● ─ the ─ cat ─ sat
//   │       └ dog ─ (ran)     (the bonus)
//   └ a

import { node } from "/svg.js";

const MOST = 64; // nodes that are drawn: a server verifies no more
const LETTERS = 14; // of a label
const ROW = 26, BOX = 20, GAP = 14, PAD = 5, ROOT = 5; // pixels
const SEEN = { " ": "␣", "\n": "↵", "\t": "⇥" };

// Draw a round; null, or one without a speculation: hide the drawing.
export function drawTree(figure, round) {
  const svg = figure.querySelector("#tree"), hadFocus = svg.contains(document.activeElement);
  if (svg.round === round) return;
  svg.round = round;
  figure.hidden = !round?.drafted.length;
  svg.replaceChildren();
  tell(figure, "");
  if (figure.hidden) return;
  const nodes = nodesOf(round);
  svg.setAttribute("aria-label", summary(round));
  svg.append(...nodes.map(groupOf));
  place(svg, nodes);
  svg.prepend(...edges(nodes));
  figure.querySelector(".scroll").scrollTo(0, 0);
  svg.querySelector("[data-node]").setAttribute("tabindex", 0);
  if (hadFocus) svg.querySelector("[data-node]").focus();
}

// The node that a key leads to from this one; undefined: no such key, or nowhere to go.
export function nodeAt(from, key) {
  const svg = from.ownerSVGElement, all = [...svg.querySelectorAll("[data-node]")];
  const siblings = all.filter((one) => one.dataset.parent === from.dataset.parent), at = siblings.indexOf(from);
  const of = (field, value) => all.find((one) => one.dataset[field] === value);
  if (key === "ArrowRight") return of("parent", from.dataset.node);
  if (key === "ArrowLeft") return of("node", from.dataset.parent);
  if (key === "ArrowDown") return siblings[at + 1];
  if (key === "ArrowUp") return siblings[at - 1];
  if (key === "Home") return all[0];
  if (key === "End") return all.findLast((one) => !one.classList.contains("refused")) ?? all.at(-1);
  return undefined;
}

// A node is looked at: the only one that the Tab key reaches, and described below the drawing.
export function lookAt(figure, one) {
  figure.querySelectorAll("[data-node]").forEach((other) => other.setAttribute("tabindex", other === one ? 0 : -1));
  tell(figure, one.querySelector("title").textContent);
}

function tell(figure, text) {
  figure.querySelector("#node").textContent = text || "Point at a node, or use the arrow keys.";
}

// ---- the nodes: those that were drafted, then the bonus

function nodesOf(round) {
  const drafted = round.drafted.slice(0, MOST);
  const nodes = drafted.map((token, at) => {
    const isAccepted = token.accepted ?? at < round.accepted;
    return { token, at, parent: token.parent ?? at - 1, kind: isAccepted ? "accepted" : "refused", source: round.source };
  });
  const last = round.tokens.at(-1), path = nodes.filter((one) => one.kind === "accepted");
  if (last?.origin === "target" && drafted.length === round.drafted.length) {
    nodes.push({ token: last, at: nodes.length, parent: path.at(-1)?.at ?? -1, kind: "bonus", source: "target" });
  }
  for (const one of nodes) {
    one.children = nodes.filter((other) => other.parent === one.at);
    one.siblings = nodes.filter((other) => other.parent === one.parent && other.kind !== "bonus");
    one.rank = one.siblings.indexOf(one) + 1;
    one.depth = 1 + (nodes[one.parent]?.depth ?? 0);
    one.shown = shown(one.token);
  }
  return nodes;
}

// A token's text on one line, with nothing in it that is not seen or that reorders what is around it.
function shown({ id, text }) {
  if (!text) return `#${id}`; // a special token, or a part of a character
  const code = (letter) => `U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
  return text.replace(/[\p{C}\p{Z}]/gu, (letter) => SEEN[letter] ?? code(letter));
}

function short(text) {
  const letters = [...text];
  return letters.length > LETTERS ? `${letters.slice(0, LETTERS - 1).join("")}…` : text;
}

function words({ shown, kind, depth, rank, siblings }) {
  if (kind === "bonus") return `“${shown}”: the target's own token, depth ${depth}`;
  return `“${shown}”: ${kind}, depth ${depth}, number ${rank} of ${siblings.length} after its parent`;
}

function summary(round) {
  const n = round.drafted.length, cut = n > MOST ? `, of which ${MOST} are drawn` : "";
  return `Tree of round ${round.round}: ${n} ${n === 1 ? "node" : "nodes"}${cut}, ${round.accepted} accepted.`;
}

// ---- the drawing

function groupOf(one) {
  const group = node("g", {
    class: `node ${one.kind}`,
    role: "treeitem",
    tabindex: -1,
    "data-node": one.at,
    "data-parent": one.parent,
    "data-source": one.source,
    "aria-level": one.depth,
  });
  one.label = node("text", { class: "label" }, short(one.shown));
  one.box = node("rect", { class: "box", height: BOX, rx: one.kind === "bonus" ? BOX / 2 : 3 });
  group.append(node("title", {}, words(one)), one.box, one.label);
  return group;
}

// A first child is in its parent's row, the others are below all that is drawn so far; a column is as wide as its labels.
function place(svg, nodes) {
  let last = 0;
  const put = (one, row) => {
    one.y = ROW * row + ROW / 2;
    one.children.forEach((child, at) => put(child, at ? ++last : row));
  };
  nodes.filter((one) => one.parent === -1).forEach((one, at) => put(one, at ? ++last : 0));
  const widths = [];
  for (const one of nodes) {
    one.width = Math.ceil(one.label.getComputedTextLength()) + 2 * PAD;
    widths[one.depth] = Math.max(widths[one.depth] ?? 0, one.width);
  }
  const lefts = [0, 2 * ROOT + GAP + 1];
  for (let depth = 1; depth < widths.length; depth++) lefts.push(lefts[depth] + widths[depth] + GAP);
  for (const one of nodes) {
    one.x = lefts[one.depth];
    set(one.box, { x: one.x, y: one.y - BOX / 2, width: one.width });
    set(one.label, { x: one.x + one.width / 2, y: one.y + 4 });
  }
  const width = lefts.at(-1) - GAP + 2, height = ROW * (last + 1);
  set(svg, { width, height, viewBox: `0 0 ${width} ${height}` });
}

// The text, and a line from every parent to its child; those of the path are drawn last.
function edges(nodes) {
  const line = (one) => {
    const parent = nodes[one.parent] ?? { x: 1, y: ROW / 2, width: 2 * ROOT };
    const d = `M${parent.x + parent.width} ${parent.y}H${one.x - GAP / 2}V${one.y}H${one.x}`;
    return node("path", { class: `edge ${one.kind}`, "data-to": one.at, d });
  };
  const root = node("circle", { class: "root", cx: ROOT + 1, cy: ROW / 2, r: ROOT });
  const ordered = [...nodes].sort((one, other) => (one.kind !== "refused") - (other.kind !== "refused"));
  return [root, ...ordered.map(line)];
}

function set(element, attributes) {
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
}
