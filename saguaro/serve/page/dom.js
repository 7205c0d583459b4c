// Making elements. Text from the model, the user or storage becomes text nodes only, never markup.

export const $ = (id) => document.getElementById(id);

export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

// Characters that reorder the text around them (bidirectional embeddings, overrides and isolates) are shown as boxes.
// The box is an inline block, so the character has no effect outside it; textContent keeps the character.
const REORDERS = /[\u202A-\u202E\u2066-\u2069]/;

export function textNodes(text) {
  if (!REORDERS.test(text)) return [document.createTextNode(text)];
  return text.split(/([\u202A-\u202E\u2066-\u2069])/).filter(Boolean).map((piece) => {
    if (!REORDERS.test(piece)) return document.createTextNode(piece);
    const box = element("span", "control", piece);
    box.dataset.code = `U+${piece.codePointAt(0).toString(16).toUpperCase()}`;
    return box;
  });
}

// Copy to the clipboard; false where the browser refuses. Without TLS only a page on this machine has navigator.clipboard.
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = element("textarea", "unseen");
    field.value = text;
    document.body.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    return isCopied;
  }
}
