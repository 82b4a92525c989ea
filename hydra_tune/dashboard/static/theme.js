// Light or dark before anything is painted; a classic script, since modules come after the first paint.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("hydra-tune-theme"); } catch { /* storage may be switched off */ }
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = chosen || (dark ? "dark" : "light");
})();
