// One conversation. State: `messages` (what the model is sent) and `running` (the stream that may be stopped).
// Everything that comes from the model or the server is put in as text, never as HTML.

import { chat, firstModel } from "./api.js";

const RETRY_MS = 1000;

const [log, error, form, text, send, stop, unlock, key, model, settings] = [
  "log", "error", "form", "text", "send", "stop", "unlock", "key", "model", "settings",
].map((id) => document.getElementById(id));

let messages = [];
let running = null;

/** Shows the model's name once the server has one; asks again while it loads, and says when a key is needed. */
async function connect() {
  try {
    model.textContent = await firstModel(key.value);
    showError("");
  } catch (e) {
    model.textContent = e.status === 401 ? "locked" : "connecting";
    if (e.status === 401) {
      settings.open = true;
      showError("This server asks for an API key.");
    } else {
      setTimeout(connect, RETRY_MS);
    }
  }
}

/** Adds an empty bubble and returns it. */
function addBubble(role) {
  const bubble = document.createElement("article");
  bubble.className = role;
  bubble.setAttribute("aria-label", role === "user" ? "You" : "Assistant");
  log.append(bubble);
  return bubble;
}

/** Changes the page and keeps it at its end, unless the reader has scrolled up. */
function atEnd(change) {
  const near = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  change();
  if (near) log.scrollTop = log.scrollHeight;
}

/** Appends text to a bubble once a frame: a fast stream must neither redraw for each token nor all of it. */
function painter(bubble) {
  const shown = bubble.appendChild(document.createTextNode(""));
  let pending = "";
  const flush = () => {
    if (pending) atEnd(() => shown.appendData(pending));
    pending = "";
  };
  const add = (piece) => {
    if (!pending) requestAnimationFrame(flush);
    pending += piece;
  };
  return { add, flush };
}

function showError(message) {
  error.textContent = message;
  error.hidden = !message;
}

function showRunning() {
  send.hidden = running !== null;
  stop.hidden = running === null;
}

/** Sends `question` and streams the answer into a new bubble. What came before a stop or an error is kept. */
async function ask(question) {
  const control = new AbortController();
  running = control;
  showRunning();
  showError("");
  const asked = addBubble("user");
  const bubble = addBubble("assistant");
  atEnd(() => (asked.textContent = question));
  messages.push({ role: "user", content: question });
  const paint = painter(bubble);
  let answer = "";
  const started = performance.now();
  try {
    for await (const piece of chat(messages, key.value, control.signal)) {
      if (piece.text) {
        answer += piece.text;
        paint.add(piece.text);
      }
      if (piece.usage) showFigures(bubble, piece.usage.completion_tokens, performance.now() - started);
    }
  } catch (e) {
    if (!control.signal.aborted) showError(e.message);
  }
  paint.flush();
  if (running === control) finish(question, answer, asked, bubble);
}

/** After the last piece. An exchange without any answer is undone, and its question can be sent again. */
function finish(question, answer, asked, bubble) {
  running = null;
  showRunning();
  if (answer) {
    messages.push({ role: "assistant", content: answer });
  } else {
    messages.pop();
    asked.remove();
    bubble.remove();
    if (!text.value) text.value = question;
  }
  grow();
  text.focus();
}

function showFigures(bubble, tokens, ms) {
  bubble.dataset.figures = `${tokens} tokens, ${((tokens * 1000) / ms).toFixed(1)} a second`;
}

/** As high as its text, to a third of the screen. */
function grow() {
  text.rows = Math.min(text.value.split("\n").length, 8);
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const question = text.value.trim();
  if (!question || running) return;
  text.value = "";
  grow();
  ask(question);
});
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
});
text.addEventListener("input", grow);
stop.addEventListener("click", () => running?.abort());
key.addEventListener("change", connect);
unlock.addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
document.getElementById("new").addEventListener("click", () => {
  running?.abort();
  running = null;
  messages = [];
  log.replaceChildren();
  showError("");
  showRunning();
  text.focus();
});

connect();
