// The chat page begins here.
import { App } from "./app.js";
import { onLibrary } from "./markdown.js";
import { onMath } from "./math.js";
import { changed, start, watch } from "./state.js";
import { html, render } from "./ui.js";

let round = 0; // counts what every message has to be drawn anew for: a library that came

const place = document.getElementById("app");
const draw = () => render(html`<${App} round=${round} />`, place);
const again = () => {
  round += 1;
  changed();
};
onLibrary(again);
onMath(again);
watch(draw);
matchMedia("(max-width: 760px)").addEventListener("change", changed); // the list opens and closes
draw();
start();
