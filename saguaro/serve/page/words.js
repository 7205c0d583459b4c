// Rounds and figures in words.

export const ORIGINS = {
  cache: "prepared in time",
  draft: "drafted just in time",
  ngram: "repeated from the text",
  suffix: "followed earlier",
  random: "guessed at random",
  target: "the target's own",
};

const SHAPES = {
  rate: (value) => value.toFixed(value < 1000 ? 1 : 0),
  perRound: (value) => value.toFixed(2),
  hits: (value) => `${Math.round(100 * value)} %`,
  first: (value) => (value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(2)} s`),
};

// A figure as people read it.
export function spell(name, value) {
  return value === null ? "–" : SHAPES[name](value);
}

// All figures of an answer in a line.
export function line(answer) {
  const { rate, perRound, hits, first } = answer.figures();
  const speed = `${spell("rate", rate)} tok/s, ${spell("perRound", perRound)} per round`;
  return `${speed}${hits === null ? "" : `, ${spell("hits", hits)} hits`}, first token after ${spell("first", first)}`;
}

// What a round did, in words.
export function describe(round) {
  const gained = round.tokens.length === 1 ? "one token" : `${round.tokens.length} tokens`;
  if (!round.drafted.length) return `Round ${round.round}: nothing was drafted; the target gave ${gained}.`;
  const isTree = round.drafted.some((token, at) => (token.parent ?? at - 1) !== at - 1);
  if (isTree) return `Round ${round.round}: ${describeTree(round)}, ${gained} gained.`;
  const text = round.drafted.map((token) => token.text).join("");
  const how = round.hit ? "prepared in time (hit)" : ORIGINS[round.source] ?? round.source;
  const accepted = `${round.accepted} of ${round.drafted.length} accepted`;
  return `Round ${round.round}: “${text}” was ${how}; ${accepted}, ${gained} gained.`;
}

function describeTree(round) {
  const how = round.hit ? "prepared in time (hit)" : ORIGINS[round.source] ?? round.source;
  const text = round.drafted.filter((token) => token.accepted).map((token) => token.text).join("");
  const stood = text ? `“${text}” was accepted` : "nothing was accepted";
  return `a tree of ${round.drafted.length} tokens was ${how}; ${stood}`;
}

// Where answers first differ: null, or the index of the token.
export function difference(one, other) {
  const n = Math.max(one.ids.length, other.ids.length);
  for (let at = 0; at < n; at++) if (one.ids[at] !== other.ids[at]) return at;
  return null;
}
