// The menu scrolled to the page that is shown.
document.addEventListener("DOMContentLoaded", () => {
  const menu = document.querySelector(".sidebar-scroll");
  const here = menu?.querySelector(".current-page");
  if (!here) return;
  const top = here.getBoundingClientRect().top - menu.getBoundingClientRect().top - menu.clientHeight / 2;
  menu.scrollTo({ top, behavior: "instant" });
});
