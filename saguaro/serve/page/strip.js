// The strip of rounds: when the target verified and when the draft worked, on one axis of time.
//
//   target   [ verify +3 ][ verify +1 ]
//              ● hit        ✕ miss
//   draft    [ prepare ]  [ prepare ][ respond ]

import { node } from "/svg.js";
import { describe } from "/words.js";

const LEFT = 46; // for the lanes' names
const TARGET = 6, MARK = 44, DRAFT = 58, LANE = 26, AXIS = 90; // from the top
const PER_ROUND = 30; // pixels that a round should have

// The rounds to be shown: the last, or those around the one that is looked at; they stay while that is in sight.
function windowOf(answer, width) {
  const n = Math.max(6, Math.floor((width - LEFT) / PER_ROUND));
  const { current, rounds, shown } = answer;
  if (current !== null && shown && shown[0] <= current && current < shown[1]) return shown;
  const middle = current === null ? rounds.length : current + Math.ceil(n / 2);
  const end = Math.min(rounds.length, Math.max(middle, n));
  return [Math.max(0, end - n), end];
}

export function draw(svg, answer) {
  const width = svg.clientWidth || 320;
  svg.setAttribute("viewBox", `0 0 ${width} 112`);
  const lanes = [node("text", { x: 0, y: TARGET + 18 }, "target"), node("text", { x: 0, y: DRAFT + 18 }, "draft")];
  svg.replaceChildren(...lanes);
  svg.setAttribute("aria-label", "No rounds yet.");
  if (!answer?.rounds.length) return;
  answer.shown = windowOf(answer, width);
  const start = answer.shown[0], shown = answer.rounds.slice(...answer.shown);
  const from = shown[0].verify[0]; // what was prepared for this round lies before it and is not shown
  const to = Math.max(...shown.map((round) => round.verify[1]));
  const scale = (width - LEFT) / Math.max(to - from, 1e-6);
  const x = (at) => LEFT + Math.max(0, at - from) * scale;
  const bar = ([a, b], y, kind) => {
    const wide = Math.max(1.5, x(b) - x(a) - 1);
    return node("rect", { class: kind, x: x(a), y, width: wide, height: LANE, rx: 2 });
  };
  shown.forEach((round, at) => {
    const outcome = round.hit === null ? "none" : round.hit ? "hit" : "miss";
    const group = node("g", { class: start + at === answer.current ? "current" : "", "data-at": start + at });
    const verify = bar(round.verify, TARGET, "verify");
    group.append(node("title", {}, describe(round)), verify);
    const gain = `+${round.tokens.length}`;
    if (verify.getAttribute("width") > 3 + 7 * gain.length) {
      const middle = (x(round.verify[0]) + x(round.verify[1])) / 2;
      group.append(node("text", { class: "gain", x: middle, y: TARGET + 17 }, gain));
    }
    for (const kind of ["prepare", "respond"]) {
      const span = round.draft?.[kind];
      if (span && span[1] > from) group.append(bar(span, DRAFT, `${kind} ${outcome}`));
    }
    const mark = x(round.verify[0]) + 5;
    if (round.hit) group.append(node("circle", { class: "hit", cx: mark, cy: MARK, r: 4 }));
    if (round.hit === false) group.append(node("path", { class: "miss", d: `M${mark - 4} ${MARK - 4}l8 8m0-8l-8 8` }));
    svg.append(group);
  });
  axis(svg, from, to, x, width);
  svg.setAttribute("aria-label", summary(shown));
}

// Round numbers, as many as have room. A label that would be cut off is left out.
function axis(svg, from, to, x, width) {
  const wide = measure(svg, words(to, (to - from) / 20, to >= 10)) + 8;
  const rough = (wide * (to - from)) / (width - LEFT);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((size) => size >= rough);
  svg.append(node("path", { class: "axis", d: `M${LEFT} ${AXIS}H${width}` }));
  for (let n = Math.ceil(from / step); n * step <= to; n++) {
    const at = x(n * step), label = words(n * step, step, to >= 10);
    svg.append(node("path", { class: "axis", d: `M${at} ${AXIS}v4` }));
    if (at + measure(svg, label) / 2 > width) continue;
    svg.append(node("text", { class: "tick", x: at, y: AXIS + 16 }, label));
  }
}

// A time, to the digit that tells it from one a step later.
function words(time, step, isLong) {
  const digits = (size) => Math.max(0, Math.ceil(-Math.log10(size) - 1e-9));
  return isLong ? `${time.toFixed(digits(step))} s` : `${(1000 * time).toFixed(digits(1000 * step))} ms`;
}

function measure(svg, text) {
  const label = svg.appendChild(node("text", { class: "tick" }, text));
  const found = label.getComputedTextLength();
  label.remove();
  return found;
}

// The strip in words.
function summary(rounds) {
  const sum = (value) => rounds.reduce((total, round) => total + value(round), 0);
  const ms = (kind) => `${Math.round(1000 * sum((round) => length(kind(round))))} ms`;
  const hits = sum((round) => (round.hit ? 1 : 0)), misses = sum((round) => (round.hit === false ? 1 : 0));
  return (
    `Rounds ${rounds[0].round} to ${rounds.at(-1).round}: ${sum((round) => round.tokens.length)} tokens, ` +
    `${hits} hits, ${misses} misses. The target verified for ${ms((round) => round.verify)}; the draft prepared ` +
    `for ${ms((round) => round.draft?.prepare)} and answered in ${ms((round) => round.draft?.respond)}.`
  );
}

function length(span) {
  return span ? span[1] - span[0] : 0;
}
