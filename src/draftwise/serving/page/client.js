/** Client of the server’s API. */

import { events } from "./events.js";

const UNREACHABLE = "The server cannot be reached.";
const STORAGE_KEY = "draftwise-api-key";
// Longest waits for replies that are not streamed, in milliseconds. Most wait for the end of a step.
const LONGEST_REPLY = 60000;
const LONGEST_STATS_REPLY = 5000;
// Characters that are allowed in a header.
const PRINTABLE = /^[\x21-\x7e]+$/;

/** Error of a request, with the name of the invalid field and the HTTP status, if known. */
export class ApiError extends Error {
  constructor(message, { status = null, param = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** Sends requests with the API key of this browser tab, if there is one. */
export class Client {
  get hasKey() {
    return sessionStorage.getItem(STORAGE_KEY) !== null;
  }

  /** Store a key until the tab is closed; false if it has characters not allowed in headers. */
  keepKey(key) {
    if (!PRINTABLE.test(key)) return false;
    sessionStorage.setItem(STORAGE_KEY, key);
    return true;
  }

  models() {
    return this.#json("v1/models");
  }

  speculation() {
    return this.#json("v1/speculation");
  }

  changeSpeculation(changes) {
    return this.#json("v1/speculation", { method: "PATCH", body: JSON.stringify(changes) });
  }

  stats() {
    return this.#json("v1/stats", {}, LONGEST_STATS_REPLY);
  }

  /** Yield the chunks of an answer; throws if the stream ends before it is complete. */
  async *answer(path, body, signal) {
    const options = { method: "POST", body: JSON.stringify(body), signal };
    const response = await this.#fetch(path, options);
    try {
      for await (const data of events(response.body)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(chunk.error.message, { param: chunk.error.param });
        yield chunk;
      }
    } catch (error) {
      if (error instanceof ApiError || signal.aborted) throw error;
    }
    throw new ApiError("The connection was lost during the answer.");
  }

  async #json(path, options = {}, longest = LONGEST_REPLY) {
    const signal = AbortSignal.timeout(longest);
    const response = await this.#fetch(path, { ...options, signal });
    try {
      return await response.json();
    } catch {
      if (signal.aborted) throw new ApiError(UNREACHABLE);
      throw new ApiError("The server’s reply is not JSON.", { status: response.status });
    }
  }

  async #fetch(path, options) {
    const headers = new Headers();
    if (options.body) headers.set("Content-Type", "application/json");
    if (this.hasKey) headers.set("Authorization", `Bearer ${sessionStorage.getItem(STORAGE_KEY)}`);
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
      // The user stopped the answer.
      if (options.signal?.aborted && error.name !== "TimeoutError") throw error;
      throw new ApiError(UNREACHABLE);
    }
    if (!response.ok) throw await failure(response);
    return response;
  }
}

async function failure(response) {
  const { status } = response;
  let error = null;
  try {
    error = (await response.json()).error;
  } catch {
    // The response of a proxy may not be JSON.
  }
  let message = error?.message ?? `The server responded with ${status} ${response.statusText}.`;
  const wait = Number(response.headers.get("Retry-After"));
  if (wait > 0) message += ` Try again in ${wait} s.`;
  return new ApiError(message, { status, param: error?.param ?? null });
}
