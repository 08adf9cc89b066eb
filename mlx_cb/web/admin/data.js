// What the page knows: the newest state, and what has to be remembered of the ones before.

const EVERY_MS = 1000;
const PEOPLE_EVERY = 5; // looks
const MOST_STEPS = 240;
const MOST_LINES = 400;
const SHARE_WINDOW_S = 60;

/** Everything that is shown; `state` is what /admin/state said last. */
export const known = {
  state: null,
  people: [],
  steps: [],
  lines: [],
  shares: {}, // user -> part of the machine's time in the last minute, 0 to 1
  busy: 0, // part of that minute in which the machine worked
  tokensPerSecond: 0,
  lost: "", // why the last look failed
};

const totals = []; // { at, seconds: {user: s}, generated }
let looks = 0;
let worker = null;

export class Refused extends Error {}

/** Ask the server to do something. Raises Refused with its reason. */
export async function order(path, body) {
  const answer = await fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body ?? {}),
  });
  if (answer.status === 401) location.reload();
  const content = await answer.json();
  if (!answer.ok) throw new Refused(content.error?.message ?? `${answer.status}`);
  return content;
}

/** Look once; `withPeople` also at accounts and usage, which change slowly. */
export async function look(withPeople) {
  const step = known.steps.length ? known.steps[known.steps.length - 1].step : 0;
  const line = known.lines.length ? known.lines[known.lines.length - 1].number : 0;
  const answer = await fetch(`/admin/state?after=${unread(step)}&line=${line}${withPeople ? "&people=1" : ""}`);
  if (answer.status === 401) location.reload();
  if (!answer.ok) throw new Refused(`${answer.status} ${answer.statusText}`);
  take(await answer.json());
}

// A step is measured after it is formed, so the newest ones are read again.
function unread(step) {
  const open = known.steps.find((one) => one.measured === null);
  return Math.max(0, (open ? open.step : step + 1) - 1);
}

function take(state) {
  if (state.engine.worker_pid !== worker) {
    worker = state.engine.worker_pid;
    known.steps = [];
    totals.length = 0;
  }
  known.state = state;
  if (state.people) known.people = state.people;
  known.lines = [...known.lines, ...state.log].slice(-MOST_LINES);
  takeSteps(state.overview);
  takeTotals(state);
}

function takeSteps(overview) {
  if (!overview?.steps.length) return;
  const { columns } = overview;
  const fresh = overview.steps.map((row) => Object.fromEntries(columns.map((name, k) => [name, row[k]])));
  const first = fresh[0].step;
  known.steps = [...known.steps.filter((one) => one.step < first), ...fresh].slice(-MOST_STEPS);
}

function takeTotals(state) {
  const now = {
    at: state.time,
    seconds: state.engine.machine_seconds ?? {},
    generated: state.engine.tokens?.generated ?? 0,
  };
  totals.push(now);
  while (totals.length > 2 && totals[1].at < now.at - SHARE_WINDOW_S) totals.shift();
  const then = totals[0];
  const passed = now.at - then.at;
  if (passed <= 0) return;
  const taken = Object.entries(now.seconds).map(([user, s]) => [user, s - (then.seconds[user] ?? 0)]);
  const sum = taken.reduce((all, [, s]) => all + s, 0);
  known.shares = Object.fromEntries(taken.map(([user, s]) => [user, sum > 0 ? s / sum : 0]));
  known.busy = Math.min(1, sum / passed);
  const recent = totals[Math.max(0, totals.length - 6)];
  known.tokensPerSecond = (now.generated - recent.generated) / Math.max(0.001, now.at - recent.at);
}

/** Look again and again while somebody looks at the page; a hidden page asks nothing. */
export async function watch(show) {
  for (;;) {
    if (!document.hidden) {
      try {
        await look(looks % PEOPLE_EVERY === 0);
        looks += 1;
        known.lost = "";
      } catch (error) {
        known.lost = error instanceof Refused ? error.message : "the server cannot be reached";
      }
      show();
    }
    await pause();
  }
}

function pause() {
  return new Promise((done) => {
    const timer = setTimeout(finish, EVERY_MS);
    document.addEventListener("visibilitychange", finish);
    function finish() {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", finish);
      setTimeout(done, 0);
    }
  });
}
