// The page: what is typed becomes requests, and what comes back is shown while it comes.

import { Answer } from "/answer.js";
import { resultForm } from "/calls.js";
import { $, copy, element } from "/dom.js";
import { forget, keep, kept } from "/keep.js";
import { announce, busy, enter, look, redraw, setTheme, show, shown, showRound, tell } from "/show.js";
import { card as readCard, chunks } from "/stream.js";
import { lookAt, nodeAt } from "/tree.js";
import { conversation, Turn } from "/turn.js";
import { difference, line } from "/words.js";

const SETTINGS = ["system", "tools", "temperature", "max-tokens", "seed"]; // kept over a reload; the key is not

let card = null; // of the served model
let turns = []; // of the conversation
let running = null; // AbortController of what is asked now
let isLeaving = false; // the page is being left or loaded again, which breaks off what is asked

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
  explain();
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

// After an answer: what the server measures may have changed what it says of itself.
async function refresh() {
  try {
    card = await readCard($("key").value);
    explain();
  } catch (error) {
    tell(error); // the answer itself is complete
  }
}

// Why nothing is prepared, in the server's words.
function explain() {
  const why = card.speculation?.why_not_prepared ?? "";
  $("why").textContent = why;
  $("why").hidden = !why;
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
  const system = $("system").value.trim(), tools = $("tools").value.trim(), most = $("max-tokens").value;
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: Number($("temperature").value),
    ...(most ? { max_tokens: Number(most) } : {}), // without it, what the context has room for
    ...(tools ? { tools: JSON.parse(tools) } : {}),
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
      answer.add(chunk);
      redraw();
    }
  } finally {
    const isAtEnd = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 80;
    answer.view.ariaBusy = null;
    answer.end();
    if (isAtEnd) $("log").scrollTop = $("log").scrollHeight;
    redraw();
  }
}

// What is in the message field is sent, by `work`.
function submit(work) {
  const text = $("prompt").value.trim();
  if (text) occupied((seed) => work([{ role: "user", content: text }], seed), text);
}

// Run what asks, with everything around it: one at a time, stopped by an abort, and trouble told.
async function occupied(work, text = "") {
  $("tools").closest("details").open ||= !$("tools").validity.valid; // a field that is not shown cannot be complained of
  if (running || !$("settings").reportValidity()) return;
  running = new AbortController();
  isLeaving = false;
  busy(true);
  try {
    if (!card && !(await connect())) return;
    tell(null);
    $("welcome").hidden = true;
    if (text) $("prompt").value = "";
    const seed = $("seed").value === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number($("seed").value);
    await work(seed);
    await refresh();
  } catch (error) {
    if (error.name !== "AbortError" && !isLeaving) {
      if (error.status === 401) card = null;
      if (error.status === 400 && turns.some((turn) => turn.isKept)) error.message += ". Or New chat, to begin anew.";
      tell(error);
      $("prompt").value ||= text;
    }
  } finally {
    running = null;
    busy(false);
    save();
  }
}

// Enter a turn into the conversation.
function begin(turn) {
  document.querySelectorAll(".results").forEach((form) => form.remove());
  turns.push(turn);
  enter(turn.view);
}

async function chat(says, seed) {
  const mode = chosen(), answer = new Answer(mode.name, view()), turn = new Turn(says, [answer], false);
  const { signal } = running, body = request(conversation(turns, says), mode, seed);
  const ends = { length: body.max_tokens ? "at max tokens" : "the context is full", stop: "", tool_calls: "calls tools" };
  turn.finish = (isStopped) => {
    const how = isStopped ? "stopped" : ends[answer.finish] ?? "broken off";
    const words = [mode.name, `${answer.ids.length} tokens`, `seed ${seed}`, how];
    turn.feet[0].textContent = words.filter(Boolean).join(" · ");
    turn.isKept = turns.includes(turn) && !answer.isEmpty() && Boolean(answer.finish || isStopped);
  };
  begin(turn);
  try {
    await ask(answer, body);
  } finally {
    turn.finish(signal.aborted || isLeaving);
  }
  askForResults(turn);
  announce(`${answer.content.text} — ${line(answer)}`);
}

function askForResults({ answers: [answer], view: root, isTrio }) {
  if (isTrio || !answer.calls.list.length) return;
  root.append(resultForm(answer.calls, (says) => occupied((seed) => chat(says, seed))));
  $("log").scrollTop = $("log").scrollHeight;
}

async function compare(says, seed) {
  const all = modes(), messages = conversation(turns, says);
  const answers = all.map((mode) => new Answer(mode.name, view())), turn = new Turn(says, answers, true);
  turn.feet.forEach((foot) => (foot.textContent = "waits"));
  turn.judge("First one token, so that the prompt is read; then one after the other.");
  turn.finish = () => turn.judge("stopped: no verdict");
  begin(turn);
  try {
    const first = { ...request(messages, all[0], seed), max_tokens: 1 };
    for await (const _ of chunks(first, $("key").value, running.signal));
    for (const [at, answer] of answers.entries()) {
      answer.began = performance.now();
      turn.feet[at].textContent = "runs";
      await ask(answer, request(messages, all[at], seed));
      turn.feet[at].textContent = line(answer);
    }
  } catch (error) {
    turn.judge(`${error.name === "AbortError" ? "stopped" : "broken off"}: no verdict`);
    throw error;
  }
  turn.isKept = turns.includes(turn) && !answers[0].isEmpty();
  judge(turn, seed);
}

function judge(turn, seed) {
  const [ar, ...others] = turn.answers;
  const other = others.find((answer) => difference(ar, answer) !== null);
  if (!other) {
    const last = others.at(-1), ratio = last.figures().rate / ar.figures().rate;
    const speed = Number.isFinite(ratio) ? `; ${last.method} at ${ratio.toFixed(2)} times the speed of ar` : "";
    turn.judge(`✓ identical output: ${ar.ids.length} tokens, seed ${seed}${speed}`, "good");
  } else if (card.speculation.verification === "rejection" && Number($("temperature").value) > 0) {
    const why = `${other.method} verifies by rejection, which keeps the distribution, not the text`;
    turn.judge(`different output, as expected: ${why}`);
  } else {
    const at = difference(ar, other);
    const what = `ar has ${ar.token(at)}, ${other.method} has ${other.token(at)}`;
    turn.judge(`✗ OUTPUTS DIFFER at token ${at + 1}: ${what} (seed ${seed})`, "bad");
  }
  announce(turn.verdict.textContent);
}

// ---- the conversation as a whole

function view() {
  return $("views").querySelector("input:checked").value;
}

// Show all answers as text or as tokens, with the round that is looked at in sight.
function setView(kind) {
  $("views").querySelector(`[value="${kind}"]`).checked = true;
  const answers = turns.flatMap((turn) => turn.answers);
  answers.forEach((answer) => answer.showAs(kind));
  const current = answers.find((answer) => answer === shown() && answer.current !== null);
  if (current) look(current, current.current)?.scrollIntoView({ block: "nearest" });
}

function save() {
  const settings = Object.fromEntries(SETTINGS.map((id) => [id, $(id).value]));
  $("unkept").hidden = keep(turns, { ...settings, view: view() });
}

function restore() {
  const found = kept();
  if (!found) return;
  for (const id of SETTINGS) $(id).value = found.settings[id] ?? $(id).value;
  if (found.settings.view === "tokens") setView("tokens");
  turns = found.turns.map((saved) => Turn.restored(saved, view()));
  $("welcome").hidden = turns.length > 0;
  turns.forEach((turn) => enter(turn.view));
  if (turns.at(-1)?.isKept) askForResults(turns.at(-1));
  const last = turns.at(-1)?.answers.at(-1);
  if (last) show(last);
}

function stop() {
  running?.abort();
}

function newChat() {
  stop();
  turns = [];
  forget();
  $("log").replaceChildren($("welcome"));
  $("welcome").hidden = false;
  showRound(null);
  tell(null);
  show(null);
  $("prompt").focus();
}

// ---- events

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit(chat);
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("settings").addEventListener("change", save);
$("tools").addEventListener("input", checkTools);
$("compare").addEventListener("click", () => submit(compare));
$("stop").addEventListener("click", stop);
$("clear").addEventListener("click", newChat);
$("key").addEventListener("change", connect);
$("views").addEventListener("change", () => {
  setView(view());
  save();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit(chat);
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
  if (!answer || event.ctrlKey || event.altKey || event.metaKey) return;
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: Infinity }[event.key];
  if (to !== undefined) {
    event.preventDefault();
    look(answer, to)?.scrollIntoView({ block: "nearest" });
  } else if (event.key === "Enter") {
    $("tree").querySelector("[tabindex='0']")?.focus();
  } else if (event.key.toLowerCase() === "t") {
    setView(view() === "text" ? "tokens" : "text");
    save();
  }
});
for (const kind of ["pointerover", "focusin"]) {
  $("tree").addEventListener(kind, (event) => {
    const node = event.target.closest("[data-node]");
    if (node) lookAt($("tree-figure"), node);
  });
}
$("tree").addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === "Escape") shown()?.view.focus();
  const to = nodeAt(event.target, event.key);
  if (to || /^Arrow|^Home$|^End$/.test(event.key)) event.preventDefault(); // the keys do not scroll
  to?.focus();
});
$("log").addEventListener("click", async (event) => {
  const button = event.target.closest("button.copy");
  if (!button) return;
  const isCopied = await copy(button.closest(".code").querySelector("code").textContent);
  button.textContent = isCopied ? "Copied" : "Not copied";
  announce(isCopied ? "The code is on the clipboard." : "The browser refused to copy: select the code instead.");
});
$("theme").addEventListener("click", () => {
  const theme = $("theme").textContent.toLowerCase();
  setTheme(theme);
  localStorage.setItem("theme", theme);
});
window.addEventListener("beforeunload", () => (isLeaving = true));
window.addEventListener("pagehide", () => {
  if (running) turns.at(-1)?.finish(true); // what there is of the answer stays
  save();
});
new ResizeObserver(redraw).observe($("strip"));

function checkTools() {
  let trouble = "";
  try {
    if ($("tools").value.trim() && !Array.isArray(JSON.parse($("tools").value))) trouble = "Give a JSON list of tools.";
  } catch (error) {
    trouble = `This is not JSON: ${error.message}`;
  }
  $("tools").setCustomValidity(trouble);
}

restore();
checkTools();
connect();
const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
setTheme(isDark ? "dark" : "light");
const theme = localStorage.getItem("theme"); // last: where a browser keeps nothing this throws, and nothing is lost
if (theme) setTheme(theme);
