/** Summary of a request. */

import { element } from "./dom.js";
import { NOTHING, brief, count, duration, fixed, percent } from "./format.js";

const ENDINGS = {
  stop: "ended by the model",
  length: "stopped at max tokens",
  cancelled: "cancelled",
  stopped: "stopped by you",
  error: "ended by an error",
};
// Speeds that differ by less are shown as equal.
const EQUAL = 0.005;

/** Times of the first and last token, in seconds from the start of the request. */
export class Timing {
  #start = performance.now();
  first = null;
  last = null;

  mark() {
    this.last = (performance.now() - this.#start) / 1000;
    this.first ??= this.last;
  }
}

/** The verdict above an answer, and the list of figures below it. */
export class Summary {
  #list;
  #verdict;

  constructor(list, verdict) {
    this.#list = list;
    this.#verdict = verdict;
  }

  clear() {
    this.#list.replaceChildren();
    this.#list.hidden = this.#verdict.hidden = true;
  }

  /** `usage` is null if the request ended before the server sent it. */
  show({ numTokens, usage, ending, timing }) {
    const speculation = usage?.speculation;
    const tokens = usage?.completion_tokens ?? numTokens;
    this.#judge(speculation, timing.last);
    const rows = [
      ["tokens", "Tokens", fixed(tokens), this.#ending(usage, ending), false],
      ["speed", "Speed", brief(tokens / timing.last), "tokens/s, from sending", false],
      ["first", "First token after", duration(timing.first), "from sending", false],
      [
        "accepted",
        "Accepted length",
        fixed(speculation?.mean_accepted_length, 2),
        speculation
          ? `tokens per step, ${count(speculation.num_steps, "step")}`
          : "tokens per step",
        true,
      ],
      [
        "rate",
        "Acceptance rate",
        percent(speculation?.acceptance_rate),
        speculation
          ? `${fixed(speculation.num_accepted)} of ${fixed(speculation.num_verified)} verified`
          : "of the verified tokens",
        true,
      ],
      ["lossless", "Lossless", ...lossless(speculation?.lossless), true],
    ];
    this.#list.replaceChildren(
      ...rows.map(([key, name, value, note, speculative]) =>
        element(
          "div",
          { "data-figure": key, class: speculative ? "speculative" : false },
          element("dt", {}, name),
          element("dd", { class: "value" }, value),
          element("dd", { class: "note" }, note),
        ),
      ),
    );
    this.#list.hidden = false;
  }

  #judge(speculation, seconds) {
    const found = verdict(speculation, seconds);
    this.#verdict.hidden = found === null;
    if (found === null) return;
    const [word, text, note] = found;
    this.#verdict.dataset.verdict = word;
    this.#verdict.querySelector("b").textContent = text;
    this.#verdict.querySelector("span").textContent = note;
  }

  #ending(usage, ending) {
    const text = ENDINGS[ending] ?? ending ?? "ended";
    return usage ? `${text}; prompt ${fixed(usage.prompt_tokens)}` : text;
  }
}

/**
 * How fast an answer was compared with the same answer without drafts: a word, a text and a note;
 * null if the server reports nothing of it. The server estimates the seconds that drafts saved.
 */
function verdict(speculation, seconds) {
  const saved = speculation?.seconds_saved;
  if (saved === undefined) return null;
  if (speculation.num_drafted === 0) return ["equal", "As fast as without drafts", "no token drafted"];
  if (saved === null) {
    return ["unknown", "Speed without drafts: not known yet", "no step without drafts was measured"];
  }
  const times = Math.max(0, seconds + saved) / seconds;
  if (times > 1 + EQUAL) {
    const note = `estimate: drafts saved ${duration(saved)}`;
    return ["faster", `${fixed(times, 2)} × as fast as without drafts`, note];
  }
  if (times < 1 - EQUAL) {
    const note = `estimate: drafts cost ${duration(-saved)}`;
    return ["slower", `${percent(1 - times)} slower than without drafts`, note];
  }
  return ["equal", "As fast as without drafts", "estimate"];
}

function lossless(value) {
  if (value === true) return ["Yes", "exactly the target’s distribution"];
  if (value === false) return ["No", "not the target’s distribution"];
  return [NOTHING, "not reported by the server"];
}
