/** The server’s API. */

import { events } from "./events.js";

const STORED = "draftwise-api-key";
// Only these can be in a header.
const PRINTABLE = /^[\x21-\x7e]+$/;

/** Why a request failed: what to tell, the field at fault, and the HTTP status if there was one. */
export class ApiError extends Error {
  constructor(message, { status = null, param = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** Calls the server with the key of this browser tab, if there is one. */
export class Client {
  get hasKey() {
    return sessionStorage.getItem(STORED) !== null;
  }

  /** Keep a key until the tab is closed; false if no header can hold it. */
  keepKey(key) {
    if (!PRINTABLE.test(key)) return false;
    sessionStorage.setItem(STORED, key);
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
    return this.#json("v1/stats");
  }

  /** The chunks of an answer as they come; ends with the server’s last word or an error. */
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
    throw new ApiError("The connection ended before the answer did.");
  }

  async #json(path, options = {}) {
    const response = await this.#fetch(path, options);
    try {
      return await response.json();
    } catch {
      throw new ApiError("The server’s reply is not JSON.", { status: response.status });
    }
  }

  async #fetch(path, options) {
    const headers = new Headers();
    if (options.body) headers.set("Content-Type", "application/json");
    if (this.hasKey) headers.set("Authorization", `Bearer ${sessionStorage.getItem(STORED)}`);
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (options.signal?.aborted) throw error;
      throw new ApiError("The server cannot be reached.");
    }
    if (!response.ok) throw await failure(response);
    return response;
  }
}

async function failure(response) {
  const { status } = response;
  let told = null;
  try {
    told = (await response.json()).error;
  } catch {
    // A proxy in between may answer with a page of its own.
  }
  let message = told?.message ?? `The server answered ${status} ${response.statusText}.`;
  const wait = Number(response.headers.get("Retry-After"));
  if (wait > 0) message += ` Try again in ${wait} s.`;
  return new ApiError(message, { status, param: told?.param ?? null });
}
