/** Sends one request at a time, and shows its answer while it is streamed. */

import { count } from "./format.js";
import { PastAnswers } from "./past_answers.js";
import { Legend } from "./sources.js";
import { Summary, Timing } from "./summary.js";
import { Transcript } from "./transcript.js";

const CHAT = "v1/chat/completions";
const TEXT = "v1/completions";
// Scroll to an answer that begins below this fraction of the window's height.
const SCROLL_BELOW = 0.75;
const STREAMED = {
  stream: true,
  stream_options: { include_usage: true },
  return_tokens: true,
};

/** Connects the form, the transcript, the legend and the summary. */
export class Playground {
  #client;
  #composer;
  #failed;
  #messages = [];
  #running = null;

  /** `failed` is called with the error of each failed request. */
  constructor(page, client, composer, { failed }) {
    this.#client = client;
    this.#composer = composer;
    this.#failed = failed;
    this.transcript = new Transcript(page.querySelector("#transcript"));
    this.legend = new Legend(page.querySelector("#legend"), (source) =>
      this.transcript.single(source),
    );
    this.summary = new Summary(page.querySelector("#summary"), page.querySelector("#verdict"));
    this.pastAnswers = new PastAnswers(page.querySelector("#past-answers"));
    this.card = page.querySelector(".answer");
    this.empty = page.querySelector("#nothing-yet");
    this.alert = page.querySelector("#answer-error");
    this.announcer = page.querySelector("#announcer");
    this.send = page.querySelector("#send");
    this.halt = page.querySelector("#stop");
    this.newChat = page.querySelector("#new-chat");
    this.halt.addEventListener("click", () => this.stop());
    this.newChat.addEventListener("click", () => this.forget());
  }

  get running() {
    return this.#running !== null;
  }

  stop() {
    this.#running?.abort();
  }

  /** Start a new chat. */
  forget() {
    if (this.running) return;
    this.#messages = [];
    this.transcript.clear();
    this.summary.clear();
    this.legend.reset();
    this.alert.hidden = true;
    this.newChat.hidden = true;
    this.empty.hidden = false;
  }

  /** Send the request of the form, and show its answer until it ends. */
  async start() {
    if (this.running) return;
    const settings = this.#composer.read();
    if (settings === null) return;
    const prompt = this.#composer.prompt;
    const chat = this.#composer.mode === "chat";
    const body = { ...settings, ...STREAMED, ...this.#input(chat, prompt) };
    this.#begin(chat, prompt);
    const words = this.#composer.inWords(settings);
    const request = { words, timing: new Timing(), usage: null, ending: null };
    let error = null;
    try {
      await this.#read(chat ? CHAT : TEXT, body, request);
    } catch (caught) {
      error = this.#running.signal.aborted ? null : caught;
      request.ending = error ? "error" : "stopped";
    }
    this.#end(chat, prompt, request, error);
  }

  #input(chat, prompt) {
    return chat ? { messages: [...this.#messages, { role: "user", content: prompt }] } : { prompt };
  }

  #begin(chat, prompt) {
    if (!chat) {
      this.#messages = [];
      this.newChat.hidden = true;
    }
    if (this.#messages.length === 0) this.transcript.clear();
    if (chat) {
      this.transcript.reply(prompt);
      this.#composer.prompt = "";
    } else {
      this.transcript.proceed(prompt);
    }
    this.legend.reset();
    this.summary.clear();
    this.alert.hidden = true;
    this.empty.hidden = true;
    if (this.card.getBoundingClientRect().top > SCROLL_BELOW * innerHeight) {
      this.card.scrollIntoView({ block: "start" });
    }
    this.#running = new AbortController();
    const focused = document.activeElement === this.send;
    this.halt.disabled = false;
    if (focused) this.halt.focus();
    this.send.disabled = true;
    this.announcer.textContent = "Answer started.";
  }

  async #read(path, body, request) {
    for await (const chunk of this.#client.answer(path, body, this.#running.signal)) {
      request.usage = chunk.usage ?? request.usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      request.ending = choice.finish_reason ?? request.ending;
      const text = choice.text ?? choice.delta?.content ?? "";
      // A proxy may drop keys that are not part of OpenAI's API.
      const tokens = choice.tokens ?? (text === "" ? [] : [{ text, source: null }]);
      if (tokens.length > 0) request.timing.mark();
      this.transcript.add(tokens);
      for (const { source } of tokens) this.legend.add(source);
    }
  }

  #end(chat, prompt, request, error) {
    this.#running = null;
    this.transcript.end();
    const numTokens = this.legend.total;
    const hasOutput = request.usage !== null || numTokens > 0 || this.transcript.text !== "";
    const focused = document.activeElement === this.halt;
    this.send.disabled = false;
    if (focused) this.send.focus();
    this.halt.disabled = true;
    if (hasOutput) this.summary.show({ ...request, numTokens });
    if (request.usage) this.pastAnswers.add(request);
    if (chat) this.#remember(prompt, hasOutput);
    if (error) this.#refuse(error);
    else this.announcer.textContent = this.#announcement(request, numTokens);
    if (!hasOutput && !chat) this.transcript.clear();
    this.empty.hidden = hasOutput || this.#messages.length > 0;
  }

  // A message without an answer is moved back to the form, so that it can be sent again.
  #remember(prompt, hasOutput) {
    if (hasOutput) {
      this.#messages.push(
        { role: "user", content: prompt },
        { role: "assistant", content: this.transcript.text },
      );
    } else {
      this.transcript.withdraw();
      if (this.#composer.prompt === "") this.#composer.prompt = prompt;
    }
    this.newChat.hidden = this.#messages.length === 0;
  }

  #refuse(error) {
    this.announcer.textContent = "";
    this.#failed(error);
    if (this.#composer.refuse(error.param, error.message)) return;
    this.alert.textContent = error.message;
    this.alert.hidden = false;
  }

  #announcement({ usage, ending }, numTokens) {
    const tokens = count(usage?.completion_tokens ?? numTokens, "token");
    return ending === "stopped" ? `Stopped after ${tokens}.` : `Answer finished, ${tokens}.`;
  }
}
