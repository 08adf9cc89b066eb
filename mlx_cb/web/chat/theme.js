// Before anything is drawn: the colours that the person chose, so that nothing flashes.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("mlx-cb.theme");
  } catch {
    chosen = null; // storage is forbidden: the system's colours
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
