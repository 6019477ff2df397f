/** Puts the page together. */

import { Client } from "./client.js";
import { Composer } from "./composer.js";
import { Field } from "./fields.js";
import { Monitor } from "./monitor.js";
import { OperatorPanel } from "./operator.js";
import { Playground } from "./playground.js";

// Another operator may change the server's setting: ask again after so many replies of stats.
const SETTING_EVERY = 10;

const at = (selector) => document.querySelector(selector);
const client = new Client();
const composer = new Composer(at("#composer"));
const playground = new Playground(document, client, composer, { failed: noteKey });
const operator = new OperatorPanel(at("#operator"), client, { applied: show, failed: noteKey });
const monitor = new Monitor(at("#live"), client, { answered, failed });
const keyField = new Field(at("#key-field"));
let replies = 0;
let known = false;

/** Ask for the API key if that is what an error is about; true if it is. */
function noteKey(error) {
  if (error.status !== 401) return false;
  const form = at("#key-form");
  if (form.hidden) {
    form.hidden = false;
    keyField.control.focus();
  }
  if (client.hasKey) keyField.refuse("The server refused this key.");
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
  composer.showModels(models.data.map(({ id }) => id));
  show(speculation);
  known = true;
}

async function answered() {
  replies += 1;
  health("live", "live");
  at("#key-form").hidden = true;
  try {
    if (!known) await learn();
    else if (replies % SETTING_EVERY === 0) show(await client.speculation());
  } catch (error) {
    failed(error);
  }
}

/** Say that the server does not answer as it should; false to stop asking it. */
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
    keyField.refuse("A key is made of ASCII letters, digits and signs, without spaces.");
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
