// Asking the server: JSON in, server-sent events out, and every way it can go wrong told with its remedy.

export class Trouble extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function send(path, options) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("The server cannot be reached. Check that `saguaro serve` still runs, then send again.");
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null); // a proxy may answer in another shape
  const said = body?.error?.message ?? answer.statusText;
  if (answer.status === 401) throw new Trouble("This server wants an API key. Type it under Settings and Enter.", 401);
  if (answer.status === 429) {
    const wait = answer.headers.get("Retry-After");
    throw new Trouble(`The server is busy: ${said}. Send again${wait ? ` in ${wait} s` : " a little later"}.`, 429);
  }
  throw new Trouble(`The server refused (${answer.status}): ${said}`, answer.status);
}

// The card of the served model, with what it says of speculation.
export async function card(key) {
  const answer = await send("/v1/models", { headers: headers(key) });
  return (await answer.json()).data[0];
}

// Chunks of a chat completion as they come; ends with the server's [DONE], or throws.
export async function* chunks(body, key, signal) {
  const answer = await send("/v1/chat/completions", {
    method: "POST",
    headers: headers(key),
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(answer.body.getReader())) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Trouble(`The server ended the answer: ${chunk.error.message}. Send again.`);
    yield chunk;
  }
  throw new Trouble("The connection broke before the answer was complete. Check the server, then send again.");
}

// The data of each event, from bytes cut anywhere.
async function* events(reader) {
  const decoder = new TextDecoder();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        return { done: true }; // a connection that breaks is an end without [DONE]
      });
      if (done) return;
      held += decoder.decode(value, { stream: true });
      const whole = held.split("\n\n");
      held = whole.pop();
      for (const event of whole) yield event.replace(/^data: /, "");
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever stops reading leaves; the server then frees what it held
  }
}
