// The conversation over a reload, in the tab's session storage: no other tab sees it, and closing the tab forgets it.
// The API key is never written. What cannot be read back is dropped.

const PLACE = "conversation", VERSION = 1;
const MAX_CHARACTERS = 2_000_000; // browsers keep about 5 million; the oldest rounds are left out first, then the oldest turns

// False if the browser keeps nothing.
export function keep(turns, settings) {
  try {
    const text = JSON.stringify({ version: VERSION, settings, turns: fitting(turns, MAX_CHARACTERS) });
    sessionStorage.setItem(PLACE, text);
    return true;
  } catch {
    return false; // storage is switched off or full
  }
}

export function forget() {
  try {
    sessionStorage.removeItem(PLACE);
  } catch {
    // storage is switched off: nothing was kept
  }
}

// { settings, turns }, or null.
export function kept() {
  try {
    const found = JSON.parse(sessionStorage.getItem(PLACE));
    if (found === null) return null;
    check(found, { version: (value) => value === VERSION, settings: isTexts, turns: listOf(isTurn) });
    return found;
  } catch (error) {
    console.warn(`the conversation that was kept cannot be read and is dropped: ${error.message}`);
    forget();
    return null;
  }
}

// The newest turns, and the rounds of the newest of these.
function fitting(turns, room) {
  const found = [];
  for (const turn of [...turns].reverse()) {
    const saved = turn.saved(false), size = JSON.stringify(saved).length;
    if (size > room) break;
    room -= size;
    found.push({ turn, saved, size });
  }
  return found.map(({ turn, saved, size }) => {
    const whole = turn.saved(true), more = JSON.stringify(whole).length - size;
    if (more > room) return saved;
    room -= more;
    return whole;
  }).reverse();
}

// ---- shapes: a function that says whether a value is right, or an object of them by field

const isText = (value) => typeof value === "string";
const isNumber = (value) => Number.isFinite(value);
const isBoolean = (value) => typeof value === "boolean";
const isTexts = (value) => Object.values(value).every(isText);
const or = (shape) => (value) => value === null || fits(value, shape);
const listOf = (shape, least = 0) => (value) => Array.isArray(value) && value.length >= least && value.every((one) => fits(one, shape));
const isSpan = (value) => Array.isArray(value) && value.length === 2 && value.every(isNumber);
const isPart = (value) => isSpan(value) && value.every(Number.isInteger) && value[0] >= 0 && value[1] >= -1;

const TOKEN = { id: isNumber, text: isText };
// Nodes of a tree have their parent before them, and whether they were accepted; of a chain neither is told.
function isDrafted(value) {
  const isNode = ({ parent, accepted }, at) =>
    parent === undefined ? accepted === undefined : Number.isInteger(parent) && -1 <= parent && parent < at && isBoolean(accepted);
  return listOf(TOKEN)(value) && value.every(isNode);
}

const ROUND = {
  round: isNumber,
  drafted: isDrafted,
  accepted: isNumber,
  source: isText,
  hit: or(isBoolean),
  tokens: listOf({ ...TOKEN, origin: (value) => /^[a-z]+$/.test(value) }),
  verify: isSpan,
  draft: or({ respond: isSpan, prepare: or(isSpan) }),
};
const CHANNEL = { text: isText, parts: listOf(isPart) };
const FIELDS = {
  method: isText,
  finish: or(isText),
  first: or(isNumber),
  last: or(isNumber),
  content: CHANNEL,
  reasoning: CHANNEL,
  calls: listOf({ id: isText, name: isText, arguments: isText }),
  rounds: listOf(ROUND),
};
// Every part of a text lies in the tokens that it names.
function isPlaced({ text, parts }, n) {
  const ends = [...parts.slice(1).map(([start]) => start), text.length];
  const lies = ([start, raw], at) => start <= ends[at] && (raw === -1 || raw + ends[at] - start <= n);
  return (parts[0]?.[0] ?? text.length) === 0 && parts.every(lies);
}

function isAnswer(value) {
  if (!fits(value, FIELDS)) return false;
  const n = value.rounds.flatMap((round) => round.tokens).reduce((sum, token) => sum + token.text.length, 0);
  return isPlaced(value.content, n) && isPlaced(value.reasoning, n);
}

const TURN = {
  says: listOf({ role: (value) => value === "user" || value === "tool", content: isText }, 1),
  isTrio: isBoolean,
  isKept: isBoolean,
  answers: listOf(isAnswer, 1),
  feet: listOf(isText, 1),
  verdict: (value) => listOf(isText)(value) && value.length === 2 && /^[a-z]*$/.test(value[1]),
};

function isTurn(value) {
  return fits(value, TURN) && value.feet.length === value.answers.length && (value.isTrio || value.answers.length === 1);
}

function fits(value, shape) {
  if (typeof shape === "function") return shape(value);
  return value !== null && typeof value === "object" && Object.entries(shape).every(([name, one]) => fits(value[name], one));
}

function check(value, shape) {
  for (const [name, one] of Object.entries(shape)) if (!fits(value[name], one)) throw new Error(`${name} is not as it was written`);
}
