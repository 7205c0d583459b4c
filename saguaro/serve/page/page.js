// The page: what is typed becomes requests, and what comes back is shown as it comes.

import { Answer, difference, element, line } from "/answer.js";
import { $, announce, busy, enter, look, redraw, setTheme, show, shown, tell } from "/show.js";
import { card as readCard, chunks } from "/stream.js";

let card = null; // of the served model
let history = []; // turns so far, as the API has them
let running = null; // AbortController of what is asked now

// ---- the server and its methods

async function connect() {
  try {
    card = await readCard($("key").value);
  } catch (error) {
    card = null;
    tell(error);
    return false;
  }
  tell(null);
  const spec = card.speculation;
  const how = spec ? `${spec.method}, lookahead ${spec.lookahead}` : "without speculation";
  $("model").textContent = `${card.id} · ${how}`;
  $("max-tokens").max = card.max_model_len;
  const all = modes(), before = chosen()?.name;
  $("methods").hidden = $("compare").hidden = all.length < 2;
  $("methods").querySelectorAll("label").forEach((label) => label.remove());
  for (const mode of all) {
    const label = element("label"), input = element("input");
    Object.assign(input, { type: "radio", name: "method", value: mode.name, checked: mode.name === before });
    label.title = mode.about;
    label.append(input, element("span", "", mode.name));
    $("methods").append(label);
  }
  if (!chosen()) $("methods").querySelector("label:last-child input").checked = true;
  return true;
}

// The ways in which this server can decode: fields of a request, from the slowest to the server's own.
function modes() {
  const ar = { name: "ar", fields: { speculation: false }, about: "the target alone, one token per round" };
  const sd = { name: "sd", fields: { prepare: false }, about: "draft, then verify" };
  const spec = card?.speculation;
  if (!spec) return [ar];
  const about = spec.prepares ? "prepare the next drafts while verifying" : sd.about;
  const own = { name: spec.method, fields: {}, about };
  return spec.prepares ? [ar, sd, own] : [ar, own];
}

function chosen() {
  const checked = $("methods").querySelector("input:checked");
  return modes().find((mode) => mode.name === checked?.value);
}

function request(messages, mode, seed) {
  const system = $("system").value.trim();
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: Number($("temperature").value),
    max_tokens: Number($("max-tokens").value),
    seed,
    stream: true,
    stream_options: { include_usage: true },
    return_speculation: true,
    ...mode.fields,
  };
}

// ---- asking

async function ask(answer, body) {
  show(answer);
  answer.view.ariaBusy = "true";
  try {
    for await (const chunk of chunks(body, $("key").value, running.signal)) {
      const isAtEnd = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 80;
      answer.add(chunk);
      redraw();
      if (isAtEnd) $("log").scrollTop = $("log").scrollHeight;
    }
  } finally {
    answer.view.ariaBusy = null;
    answer.end();
    redraw();
  }
}

// Run what asks, with everything around it: one at a time, stopped by an abort, and trouble told.
async function occupied(work) {
  const text = $("prompt").value.trim();
  if (running || !text || !$("settings").reportValidity()) return;
  running = new AbortController();
  busy(true);
  try {
    if (!card && !(await connect())) return;
    tell(null);
    $("welcome").hidden = true;
    $("prompt").value = "";
    const seed = $("seed").value === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number($("seed").value);
    await work(text, seed);
  } catch (error) {
    if (error.name !== "AbortError") {
      if (error.status === 401) card = null;
      if (error.status === 400 && history.length) error.message += ". Or Clear, to begin anew.";
      tell(error);
      $("prompt").value ||= text;
    }
  } finally {
    running = null;
    busy(false);
  }
}

async function chat(text, seed) {
  const mode = chosen(), answer = new Answer(mode.name), { signal } = running;
  const turn = element("article", "turn"), foot = element("p", "foot");
  const turns = [...history, { role: "user", content: text }];
  turn.append(element("p", "user", text), answer.view, foot);
  enter(turn);
  try {
    await ask(answer, request(turns, mode, seed));
  } finally {
    const how = signal.aborted ? "stopped" : { length: "at max tokens", stop: "" }[answer.finish] ?? "broken off";
    foot.textContent = [mode.name, `${answer.ids.length} tokens`, `seed ${seed}`, how].filter(Boolean).join(" · ");
    const isKept = turn.isConnected && answer.content && (answer.finish || signal.aborted);
    if (isKept) history = [...turns, { role: "assistant", content: answer.content }];
  }
  announce(`${answer.content} — ${line(answer)}`);
}

async function compare(text, seed) {
  const all = modes(), turns = [...history, { role: "user", content: text }];
  const turn = element("article", "turn trio"), columns = element("div", "columns");
  const verdict = element("p", "verdict", "First one token, so that the prompt is read; then one after the other.");
  turn.append(element("p", "user", text), columns, verdict);
  const answers = all.map((mode) => {
    const answer = new Answer(mode.name), column = element("section");
    answer.foot = element("p", "foot", "waits");
    column.append(element("h3", "", mode.name), answer.view, answer.foot);
    columns.append(column);
    return answer;
  });
  enter(turn);
  try {
    const first = { ...request(turns, all[0], seed), max_tokens: 1 };
    for await (const _ of chunks(first, $("key").value, running.signal));
    for (const [at, answer] of answers.entries()) {
      answer.began = performance.now();
      answer.foot.textContent = "runs";
      await ask(answer, request(turns, all[at], seed));
      answer.foot.textContent = line(answer);
    }
  } catch (error) {
    verdict.textContent = `${error.name === "AbortError" ? "stopped" : "broken off"}: no verdict`;
    throw error;
  }
  history = [...turns, { role: "assistant", content: answers[0].content }];
  judge(verdict, answers, seed);
}

function judge(verdict, answers, seed) {
  const [ar, ...others] = answers;
  const other = others.find((answer) => difference(ar, answer) !== null);
  if (!other) {
    const last = others.at(-1), ratio = last.figures().rate / ar.figures().rate;
    const speed = Number.isFinite(ratio) ? `; ${last.method} at ${ratio.toFixed(2)} times the speed of ar` : "";
    verdict.textContent = `✓ identical output: ${ar.ids.length} tokens, seed ${seed}${speed}`;
    verdict.classList.add("good");
  } else if (card.speculation.verification === "rejection" && Number($("temperature").value) > 0) {
    const why = `${other.method} verifies by rejection, which keeps the law, not the text`;
    verdict.textContent = `different output, as expected: ${why}`;
  } else {
    const at = difference(ar, other);
    const what = `ar has ${ar.token(at)}, ${other.method} has ${other.token(at)}`;
    verdict.textContent = `✗ OUTPUTS DIFFER at token ${at + 1}: ${what} (seed ${seed})`;
    verdict.classList.add("bad");
  }
  announce(verdict.textContent);
}

// ---- events

function stop() {
  running?.abort();
}

function clear() {
  stop();
  history = [];
  $("log").replaceChildren($("welcome"));
  $("welcome").hidden = false;
  $("round").textContent = "";
  tell(null);
  show(null);
  $("prompt").focus();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  occupied(chat);
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("compare").addEventListener("click", () => occupied(compare));
$("stop").addEventListener("click", stop);
$("clear").addEventListener("click", clear);
$("key").addEventListener("change", connect);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  occupied(chat);
});
document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
$("log").addEventListener("pointerover", (event) => {
  const round = event.target.closest(".round");
  if (round) look(round.closest(".answer").answer, Number(round.dataset.at));
});
$("strip").addEventListener("pointerover", (event) => {
  const round = event.target.closest("[data-at]");
  if (round && Number(round.dataset.at) !== shown().current) look(shown(), Number(round.dataset.at));
});
$("log").addEventListener("keydown", (event) => {
  const answer = event.target.answer, at = answer?.current ?? -1;
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: Infinity }[event.key];
  if (!answer || to === undefined) return;
  event.preventDefault();
  look(answer, to);
});
$("theme").addEventListener("click", () => {
  const theme = $("theme").textContent.toLowerCase();
  setTheme(theme);
  localStorage.setItem("theme", theme);
});
new ResizeObserver(redraw).observe($("strip"));

connect();
const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
setTheme(isDark ? "dark" : "light");
const kept = localStorage.getItem("theme"); // last: where a browser keeps nothing this throws, and nothing is lost
if (kept) setTheme(kept);
