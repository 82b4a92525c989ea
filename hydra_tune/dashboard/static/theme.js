// Sets light or dark before the first paint; a classic script, since modules run after it.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("hydra-tune-theme"); } catch { /* storage may be disabled */ }
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = chosen || (dark ? "dark" : "light");
})();
