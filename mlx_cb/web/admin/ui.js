// Small parts that the sections share.
import { Component, h, render } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export const html = htm.bind(h);
export { render };

const UNITS = ["", "k", "M", "G", "T"];

/** 1234567 → 1.2M */
export function short(number) {
  let value = number ?? 0;
  let unit = 0;
  while (Math.abs(value) >= 1000 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value >= 100 || Number.isInteger(value) ? Math.round(value) : value.toFixed(1)}${UNITS[unit]}`;
}

/** Bytes as GB. */
export function gigabytes(bytes) {
  return `${(bytes / 1e9).toFixed(bytes < 1e10 ? 2 : 1)} GB`;
}

/** Seconds as a person would say them. */
export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export const percent = (part) => `${(100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0)} %`;

export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });

export const Figure = ({ name, value, note }) => html`
  <div class="figure"><dt>${name}</dt><dd>${value}${note && html`<small>${note}</small>`}</dd></div>`;

/** Parts of a whole, side by side; `share`s are from 0 to 1. */
export function Bar({ label, parts }) {
  let from = 0;
  return html`<svg class="bar" viewBox="0 0 100 1" preserveAspectRatio="none" role="img" aria-label=${label}>
    ${parts.map(({ share, kind }) => {
      const x = from;
      from += 100 * share;
      return html`<rect class=${kind} x=${x} width=${Math.max(0, 100 * share)} height="1" />`;
    })}
  </svg>`;
}

const SURE_MS = 4000;

/**
 * A button. One with `sure` asks that and does its work on the second click only; what goes wrong
 * stands beside it.
 */
export class Act extends Component {
  state = { asks: false, works: false, wrong: "" };

  click = async () => {
    clearTimeout(this.timer);
    if (this.props.sure && !this.state.asks) {
      this.setState({ asks: true, wrong: "" });
      this.timer = setTimeout(() => this.setState({ asks: false }), SURE_MS);
      return;
    }
    this.setState({ asks: false, works: true, wrong: "" });
    try {
      await this.props.run();
      this.setState({ works: false });
    } catch (error) {
      this.setState({ works: false, wrong: error.message });
    }
  };

  componentWillUnmount() {
    clearTimeout(this.timer);
  }

  render({ label, title, sure, kind }, { asks, works, wrong }) {
    return html`<button type="button" class=${asks ? "bad strong" : (kind ?? "")} title=${title ?? ""}
        disabled=${works} onClick=${this.click}>${asks ? sure : label}</button>
      ${wrong && html`<span class="bad" role="alert">${wrong}</span>`}`;
  }
}
