/** The API under /v1: requests, uploads in parts, a job's events. */

export const PART_BYTES = 4 * 1024 * 1024;
export const ENDED = ["done", "failed", "cancelled"];
export const ACTIVE = ["running", "pausing", "cancelling"];
const TRIES = 5;
const AGAIN_S = 3;
const KEY = "ondevice-key";
const KINDS = ["job", "start", "resume", "step", "evaluate", "checkpoint", "warning", "interrupt", "error", "finish"];

/** What the API refused, with its `expected`, `received`, `hint` and `problems`. */
export class ApiError extends Error {
  constructor(status, answer) {
    super(answer.message ?? `the server responded with ${status}`);
    Object.assign(this, { status, expected: answer.expected, received: answer.received, hint: answer.hint });
    this.problems = answer.problems ?? [];
  }
}

/** The server does not answer. */
export class UnreachableError extends Error {
  constructor() {
    super("the daemon does not respond");
    Object.assign(this, { status: 0, expected: "a running daemon", received: "no response", problems: [] });
    this.hint = "this page keeps trying; see whether the machine is on, and whether the daemon runs there";
  }
}

/** One request; its response, or the ApiError that it was refused with. */
async function request(method, path, body, signal, headers = {}) {
  const options = { method, signal, credentials: "same-origin", headers: { ...headers } };
  const key = localStorage.getItem(KEY);
  if (key !== null) options.headers["X-Ondevice-Key"] = key;
  if (body instanceof Blob) {
    options.headers["Content-Type"] = "application/octet-stream";
    options.body = body;
  } else if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    document.dispatchEvent(new Event("unreachable"));
    throw new UnreachableError();
  }
  document.dispatchEvent(new Event("reachable"));
  if (response.ok) return response;
  const answer = await content(response);
  const error = new ApiError(response.status, typeof answer === "object" ? plain(answer) : {});
  if (error.status === 401 && path !== "/v1/session") document.dispatchEvent(new Event("signed-out"));
  throw error;
}

const content = (response) => {
  const kind = response.headers.get("Content-Type") ?? "";
  return kind.startsWith("application/json") ? response.json() : response.text();
};

/** A refusal in the form of OpenAI's, whose message repeats the other fields, as ours. */
const plain = (answer) =>
  answer.error?.message
    ? { ...answer.error, message: answer.error.message.split(/; (?:expected|received|try): /)[0] }
    : answer;

/** One request; the answer as JSON, or as text where it is text. */
export const ask = async (method, path, body = undefined, signal = undefined, headers = {}) =>
  content(await request(method, path, body, signal, headers));

/** The answer to a POST as a file. */
export const fetched = async (path, body, signal) => (await request("POST", path, body, signal)).blob();

/** The pieces of a streamed answer, in OpenAI's form, as they come; aborting ends the answer. */
export async function* streamed(path, body, signal) {
  const response = await request("POST", path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    while (true) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new UnreachableError();
      });
      if (done) throw new UnreachableError(); // the end is said with a piece of its own
      const pieces = (held + value).split("\n\n");
      held = pieces.pop();
      for (const piece of pieces) {
        const data = piece.slice("data: ".length);
        if (data === "[DONE]") return;
        const values = JSON.parse(data);
        if (values.error) throw new ApiError(500, plain(values));
        yield values;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export const get = (path, signal) => ask("GET", path, undefined, signal);
export const post = (path, body, signal) => ask("POST", path, body, signal);

/** The models that a job can name; the answer has adapters and artifacts too, for OpenAI's clients. */
export const listModels = async (signal) =>
  (await get("/v1/models", signal)).data.filter((model) => !["adapter", "artifact"].includes(model.kind));

/** A path with an id in it that may hold anything. */
export const at = (base, id, rest = "") => `${base}/${encodeURIComponent(id)}${rest}`;

/** An address that the browser asks for by itself, such as a link: it cannot send the session's key as a header. */
export function keyed(address) {
  const key = localStorage.getItem(KEY);
  if (key === null) return address;
  return `${address}${address.includes("?") ? "&" : "?"}key=${encodeURIComponent(key)}`;
}

/** Keep the page's half of a session: the storage belongs to this port, while the cookie reaches every port. */
export const keepKey = ({ key }) => localStorage.setItem(KEY, key);
export const forgetKey = () => localStorage.removeItem(KEY);

/**
 * Send a file in parts; a part whose answer was lost goes on where the server stands. What is left alone is forgotten by
 * the daemon after a day.
 * @param fields kind, name and the options of POST /v1/uploads
 * @param progress told how many bytes have arrived
 * @param look given the path of the upload once all has arrived; what it gives is sent with the end
 * @returns what it became: `{kind, id}`
 */
export async function upload(file, fields, progress = () => {}, signal = undefined, look = () => undefined) {
  // After a reload, or in another view, the same file with the same options goes on where it stopped.
  const request = { name: file.name, ...fields, bytes: file.size };
  const key = `upload ${file.lastModified} ${JSON.stringify(request)}`;
  const known = sessionStorage.getItem(key);
  const begun = known
    ? await get(at("/v1/uploads", known), signal).catch((error) => {
        if (error.status !== 404) throw error;
        return null;
      })
    : null;
  const { id, received_bytes: there = 0 } = begun ?? (await post("/v1/uploads", request, signal));
  sessionStorage.setItem(key, id);
  const path = at("/v1/uploads", id);
  let sent = there;
  let failed = 0;
  progress(sent);
  try {
    while (sent < file.size) {
      try {
        const part = file.slice(sent, sent + PART_BYTES);
        sent = (await ask("PUT", `${path}?offset=${sent}`, part, signal)).received_bytes;
        failed = 0;
      } catch (error) {
        failed += 1;
        if ((error.status !== 0 && error.status !== 409) || failed > TRIES) throw error;
        await pause(AGAIN_S, signal);
        sent = (await get(path, signal)).received_bytes;
      }
      progress(sent);
    }
    const placed = await post(`${path}/finish`, await look(path), signal);
    sessionStorage.removeItem(key);
    return placed;
  } catch (error) {
    if (error.status > 0 && error.status !== 401) sessionStorage.removeItem(key); // refused for what it is
    throw error;
  }
}

/** Wait, unless the view is left. */
export function pause(seconds, signal = undefined) {
  return new Promise((resolve, reject) => {
    const left = () => {
      clearTimeout(timer);
      reject(new DOMException("left", "AbortError"));
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", left); // a view that stays open for days waits very often
      resolve();
    }, 1000 * seconds);
    signal?.addEventListener("abort", left, { once: true });
  });
}

/** Call `work` now and every so often, until the view is left; not while nobody looks at the page. */
export async function every(seconds, work, signal) {
  while (!signal.aborted) {
    try {
      if (!document.hidden) await work();
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error.status === undefined) throw error; // a mistake of this page
    }
    await pause(seconds, signal).catch(() => {});
  }
}

/** A job's events behind `after`, once opened; goes on after a lost connection, and closes when the job has ended. */
export class Events {
  constructor(job, after, told, state = () => {}) {
    Object.assign(this, { job, last: after, told, state, source: null });
  }

  open() {
    this.close();
    this.source = new EventSource(keyed(`${at("/v1/jobs", this.job)}/events?after=${this.last}`));
    this.source.onopen = () => this.state("open");
    for (const kind of KINDS) this.source.addEventListener(kind, (message) => this.#take(message));
  }

  #take(message) {
    if (message.data === undefined) return this.#lost();
    const event = JSON.parse(message.data);
    this.last = Number(message.lastEventId) || this.last;
    this.told(event);
    if (event.event === "job" && ENDED.includes(event.state)) this.close();
    return undefined;
  }

  /** The browser asks again by itself unless it was refused, as it is while the daemon starts. */
  #lost() {
    if (!this.source) return;
    this.state("lost");
    if (this.source.readyState === EventSource.CLOSED) this.timer = setTimeout(() => this.open(), 1000 * AGAIN_S);
  }

  close() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }
}
