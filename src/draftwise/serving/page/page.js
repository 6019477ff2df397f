/** Entry point of the page. */

import { Client } from "./client.js";
import { Composer } from "./composer.js";
import { Field } from "./fields.js";
import { Monitor } from "./monitor.js";
import { OperatorPanel } from "./operator.js";
import { Playground } from "./playground.js";

// Settings may be changed by others, so they are requested again after this many polls.
const POLLS_PER_SETTINGS = 10;

const at = (selector) => document.querySelector(selector);
const client = new Client();
const composer = new Composer(at("#composer"));
const playground = new Playground(document, client, composer, { failed: noteKey });
const operator = new OperatorPanel(at("#operator"), client, { applied: show, failed: noteKey });
const monitor = new Monitor(at("#live"), client, { answered, failed });
const keyField = new Field(at("#key-field"));
let replies = 0;
let known = false;

/** Show the form for the API key if an error is about it; true if it is. */
function noteKey(error) {
  if (error.status !== 401) return false;
  const form = at("#key-form");
  if (form.hidden) {
    form.hidden = false;
    keyField.control.focus();
  }
  if (client.hasKey) keyField.refuse("The server rejected this key.");
  health("key", "needs an API key");
  return true;
}

function health(state, text) {
  const status = at("#health");
  if (status.textContent === text) return;
  status.parentElement.dataset.state = state;
  status.textContent = text;
}

function show(speculation) {
  document.body.classList.toggle("no-speculation", !speculation.enabled);
  at("#operator").hidden = !speculation.enabled;
  at("#no-draft").hidden = speculation.enabled;
  for (const role of ["target", "draft", "companion"]) {
    const name = at(`#model-${role}`);
    name.textContent = speculation[role] ?? "none";
    name.title = name.textContent;
  }
  composer.showSpeculation(speculation);
  operator.show(speculation);
}

async function learn() {
  const [models, speculation] = await Promise.all([client.models(), client.speculation()]);
  composer.showModels(models.data);
  show(speculation);
  known = true;
}

async function answered(stats) {
  replies += 1;
  at("#key-form").hidden = true;
  // The statistics are answered without the engine, which may be starting again.
  if (stats.status !== "ok") {
    health("lost", stats.reason ?? stats.status);
    return;
  }
  health("live", "live");
  try {
    if (!known) await learn();
    else if (replies % POLLS_PER_SETTINGS === 0) show(await client.speculation());
  } catch (error) {
    failed(error);
  }
}

/** Show an error of the server; false to stop polling. */
function failed(error) {
  if (noteKey(error)) return false;
  health("lost", error.status === null ? "not reachable, trying again" : error.message);
  return true;
}

at("#composer").addEventListener("submit", (event) => {
  event.preventDefault();
  playground.start();
});

at("#key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keyField.clear();
  if (client.keepKey(keyField.control.value.trim())) {
    keyField.control.value = "";
    monitor.start();
  } else {
    keyField.refuse("A key may contain only printable ASCII characters, without spaces.");
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    if (event.target.closest("#operator, #key-form")) return;
    event.preventDefault();
    playground.start();
  } else if (event.key === "Escape" && playground.running) {
    event.preventDefault();
    playground.stop();
  }
});

monitor.start();
