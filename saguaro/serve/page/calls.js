// Tool calls of an answer: put together from their deltas, shown in boxes, and answered by what the user types.

import { element, textNodes } from "/dom.js";

export class Calls {
  constructor() {
    this.list = []; // { id, name, arguments }
  }

  add(deltas) {
    for (const delta of deltas) {
      const at = delta.index ?? this.list.length;
      const call = (this.list[at] ??= { id: "", name: "", arguments: "" });
      call.id ||= delta.id ?? "";
      call.name += delta.function?.name ?? "";
      call.arguments += delta.function?.arguments ?? "";
    }
  }

  // As the API has them in a message.
  message() {
    return this.list.map(({ id, name, arguments: given }) => ({
      id,
      type: "function",
      function: { name, arguments: given },
    }));
  }

  draw(root, isComplete) {
    root.replaceChildren(
      ...this.list.map((call) => {
        const box = element("section", "call"), pre = element("pre"), title = element("p", "name", "calls ");
        const code = element("code");
        title.append(element("b", "", call.name));
        box.ariaLabel = `Tool call ${call.name}`;
        code.append(...textNodes(isComplete ? pretty(call.arguments) : call.arguments));
        pre.append(code);
        box.append(title, pre);
        return box;
      }),
    );
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // cut off, or not JSON: as the model wrote it
  }
}

// A form that asks for the result of each call; `send` gets the tool messages.
export function resultForm(calls, send) {
  const form = element("form", "results");
  const fields = calls.list.map((call) => {
    const label = element("label", "", `Result of ${call.name}`), field = element("textarea");
    field.rows = 1;
    field.required = true;
    label.append(field);
    form.append(label);
    return field;
  });
  const button = element("button", "", fields.length > 1 ? "Send results" : "Send result");
  form.append(button);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(calls.list.map((call, at) => ({ role: "tool", tool_call_id: call.id, content: fields[at].value })));
  });
  return form;
}
