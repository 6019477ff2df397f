/** The transcript: prompts, and answers token by token. */

import { element } from "./dom.js";
import { SOURCES } from "./sources.js";

// Maximum number of characters of a prompt that are shown before its answer.
const LONGEST_PROMPT = 600;

/** Prompts and answers, the newest last. */
export class Transcript {
  #box;
  #answer = null;

  constructor(box) {
    this.#box = box;
  }

  clear() {
    this.#box.replaceChildren();
    this.#answer = null;
  }

  /** Begin the answer to a chat message. */
  reply(message) {
    this.#answer = element("div", { class: "tokens" });
    this.#box.append(
      element("div", { class: "turn asked" }, element("h3", {}, "You"), element("p", {}, message)),
      element("div", { class: "turn" }, element("h3", {}, "Answer"), this.#answer),
    );
    this.#begin();
  }

  /** Begin the text that continues a prompt. */
  proceed(prompt) {
    const shown = prompt.length > LONGEST_PROMPT ? `…${prompt.slice(-LONGEST_PROMPT)}` : prompt;
    this.#answer = element("span", { class: "tokens" });
    const text = element("div", { class: "turn text" });
    text.append(element("span", { class: "prompt" }, shown), this.#answer);
    this.#box.append(text);
    this.#begin();
  }

  /** Append tokens to the answer. */
  add(tokens) {
    const { scrollTop, scrollHeight, clientHeight } = this.#box;
    const atEnd = scrollHeight - scrollTop - clientHeight < 40;
    this.#answer.append(...tokens.map(marked));
    if (atEnd) this.#box.scrollTop = this.#box.scrollHeight;
  }

  end() {
    this.#answer?.classList.remove("running");
    this.#box.setAttribute("aria-busy", "false");
  }

  /** The text of the newest answer. */
  get text() {
    return this.#answer?.textContent ?? "";
  }

  /** Remove the newest message and its answer. */
  withdraw() {
    for (const turn of [...this.#box.children].slice(-2)) turn.remove();
    this.#answer = null;
  }

  /** Dim all tokens except those of one source; null dims none. */
  single(source) {
    if (source === null) delete this.#box.dataset.only;
    else this.#box.dataset.only = source;
  }

  #begin() {
    this.#answer.classList.add("running");
    this.#box.setAttribute("aria-busy", "true");
    this.#box.scrollTop = this.#box.scrollHeight;
  }
}

function marked({ text, source }) {
  const token = element("span", { class: "token" }, text);
  if (SOURCES.has(source)) token.dataset.source = source;
  // A line break is invisible, so it gets a visible mark.
  if (/^[\r\n]+$/.test(text)) token.classList.add("break");
  return token;
}
