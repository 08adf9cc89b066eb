// Talks to the server: JSON in and out, and streams of events.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Somebody has to sign in first; the page for that comes back here. */
function signIn() {
  location.assign("/sign-in");
}

async function failure(answer) {
  let message = `${answer.status} ${answer.statusText}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // not one of the server's own errors: the status has to do
  }
  if (answer.status === 401) signIn();
  return new ApiError(answer.status, message);
}

export async function open(method, path, body, signal) {
  const options = { method, signal, cache: "no-store" };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = { "content-type": "application/json" };
  }
  const answer = await fetch(path, options);
  if (!answer.ok) throw await failure(answer);
  return answer;
}

export async function call(method, path, body) {
  return (await open(method, path, body)).json();
}

/** The data of each server-sent event; what is no JSON (like [DONE]) is left out. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.startsWith("data: ") ? part.slice(6) : "";
      if (data.startsWith("{")) yield JSON.parse(data);
    }
  }
}
