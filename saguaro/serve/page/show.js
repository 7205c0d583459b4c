// What is seen beside the answers: figures, strip, trouble; and what is said to those who do not see.

import { $ } from "/dom.js";
import { Trouble } from "/stream.js";
import { draw } from "/strip.js";
import { drawTree } from "/tree.js";
import { describe, spell } from "/words.js";

const isCalm = matchMedia("(prefers-reduced-motion: reduce)");
const PLACES = { rate: "rate", perRound: "per-round", hits: "hits", first: "first" };

let answer = null; // in figures and strip
let frame = 0; // asked for

export function enter(turn) {
  $("log").append(turn);
  $("log").scrollTop = $("log").scrollHeight;
}

// The Answer in figures and strip.
export function shown() {
  return answer;
}

export function show(other) {
  answer = other;
  redraw();
}

// The answer's view, figures and strip, once a frame; without motion the strip waits for the end.
export function redraw() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    const log = $("log"), isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    const isBusy = answer?.view.ariaBusy === "true";
    const isMade = !isBusy || answer.render();
    if (isBusy && isAtEnd) log.scrollTop = log.scrollHeight;
    const found = answer?.figures() ?? {};
    for (const [name, place] of Object.entries(PLACES)) $(place).textContent = spell(name, found[name] ?? null);
    const waits = isCalm.matches && answer?.rounds.length && isBusy;
    if (!waits) draw($("strip"), answer);
    if (!isMade) redraw();
  });
}

export function look(other, at) {
  const found = other.look(at);
  if (other.rounds.length) showRound(other.rounds[other.current]);
  show(other);
  return found;
}

// A round in words and as a tree; null: none.
export function showRound(round) {
  $("round").textContent = round ? describe(round) : "";
  drawTree($("tree-figure"), round);
}

export function tell(error) {
  $("trouble").hidden = !error;
  $("trouble").textContent = error?.message ?? "";
  if (error && !(error instanceof Trouble)) console.error(error);
  if (error?.status === 401) {
    $("key-field").hidden = false;
    $("key").focus();
  }
}

export function announce(text) {
  $("announce").textContent = text;
}

// A disabled button that has the focus would swallow every key, Esc too.
export function busy(is) {
  $("send").disabled = $("compare").disabled = is;
  $("stop").disabled = !is;
  if (document.activeElement.disabled) $(is ? "stop" : "prompt").focus();
}

export function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
}
