/** Which view is shown, signing in, and the line about this machine. */

import { ask, every, forgetKey, get } from "./api.js";
import { announce, h, setText } from "./dom.js";
import { problemBox } from "./errors.js";
import { bytes, number } from "./format.js";
import { adaptersView } from "./adapters.js";
import { chatView } from "./chat.js";
import { compareView } from "./compare.js";
import { dataView } from "./data.js";
import { fleetsView } from "./fleets.js";
import { jobView } from "./job.js";
import { jobsView } from "./jobs.js";
import { signInView } from "./signin.js";
import { wizardView } from "./wizard.js";

/** Each view is `async (main, {id, query, signal})`; it fills `main`, and stops what it began when `signal` aborts. */
const VIEWS = {
  jobs: jobsView,
  job: jobView,
  new: wizardView,
  data: dataView,
  adapters: adaptersView,
  chat: chatView,
  compare: compareView,
  fleets: fleetsView,
};
const main = document.getElementById("main");
const signOut = document.getElementById("sign-out");
let shown = new AbortController();
let signedOut = false;
let first = true;
let kept = null;

/** "#/jobs/ID?a=b" as view, id and query. */
function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name = "", id = ""] = path.split("/");
  const view = name === "jobs" && id ? "job" : name in VIEWS && name !== "job" ? name : "jobs";
  return {
    view,
    section: view === "job" ? "jobs" : view,
    id: decoded(id),
    query: new URLSearchParams(query),
  };
}

/** The text behind its percent signs; a lone one, which a person may type, is itself. */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

async function go() {
  kept = null;
  shown.abort();
  shown = new AbortController();
  const { signal } = shown;
  const { view, section, id, query } = place();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${section}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  main.replaceChildren();
  main.setAttribute("aria-busy", "true");
  try {
    if (signedOut)
      signInView(main, () => {
        signedOut = false;
        go();
      });
    else await VIEWS[view](main, { id, query, signal });
  } catch (error) {
    if (signal.aborted || error.status === 401) return;
    if (error.status === undefined) console.error(error);
    if (!main.querySelector("h1")) main.append(h("h1", {}, "This cannot be shown"));
    main.append(problemBox(error));
  }
  if (signal.aborted) return;
  main.removeAttribute("aria-busy");
  arrive();
}

/** Title and focus of a new view; the first one leaves the focus where the browser puts it. */
function arrive() {
  const title = main.querySelector("h1");
  document.title = title ? `${title.textContent} – ondevice` : "ondevice";
  if (title && !first) {
    title.tabIndex = -1;
    title.focus({ preventScroll: true });
    window.scrollTo(0, 0);
  }
  first = false;
}

async function machine() {
  const line = document.getElementById("machine");
  const now = await get("/v1/system");
  const parts = [
    `Memory: ${bytes(now.memory_available_bytes)} of ${bytes(now.memory_total_bytes)} free`,
    `disk: ${bytes(now.disk_free_bytes)} free`,
    `load: ${number(now.load, 2)} on ${now.cores} cores`,
    ...now.gpus.map((gpu) => `${gpu.name}: ${bytes(gpu.memory_used_bytes ?? NaN)} in use`),
  ];
  setText(line, parts.join(" · "));
}

document.addEventListener("signed-out", () => {
  if (signedOut) return;
  signedOut = true;
  if (main.hasAttribute("aria-busy")) go();
  else signInOver();
});

/** A session that ends takes nothing away: the view stays behind the form, as it was filled in. */
function signInOver() {
  kept = [...main.childNodes];
  main.replaceChildren();
  signInView(main, () => {
    signedOut = false;
    if (!kept) go();
    else {
      main.replaceChildren(...kept);
      kept = null;
      announce("Signed in again.");
    }
  });
}

let lost = null;
document.addEventListener("unreachable", () => {
  if (lost) return;
  lost = h(
    "p",
    { class: "notice lost", role: "alert" },
    "The daemon does not respond. This page keeps trying.",
  );
  main.before(lost);
});
document.addEventListener("reachable", () => {
  if (!lost) return;
  lost.remove();
  lost = null;
  announce("The daemon responds again.");
});

signOut.addEventListener("click", async () => {
  await ask("DELETE", "/v1/session").catch(() => {});
  forgetKey();
  signedOut = true;
  go();
});

window.addEventListener("hashchange", go);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
go();
every(
  10,
  async () => {
    signOut.hidden = !(await get("/v1/health")).token_needed || signedOut;
    if (!signedOut) await machine();
  },
  new AbortController().signal,
);
