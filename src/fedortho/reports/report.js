"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => sort(table, heads, column));
  });
}
for (const figure of document.querySelectorAll("figure")) {
  figure.classList.add("zoomable");
  for (const image of figure.querySelectorAll("img")) image.addEventListener("click", () => image.classList.toggle("large"));
}
const folded = [...document.querySelectorAll("details")];
const unfold = () => document.getElementById(location.hash.slice(1))?.querySelector("details")?.setAttribute("open", "");
addEventListener("hashchange", unfold);
addEventListener("beforeprint", () => folded.forEach((part) => part.setAttribute("open", "")));
unfold();
function sort(table, heads, column) {
  const down = heads[column].getAttribute("aria-sort") === "ascending";
  for (const head of heads) head.removeAttribute("aria-sort");
  heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => compare(key(a), key(b), down ? -1 : 1));
  table.tBodies[0].append(...rows);
}
function compare(a, b, way) {
  if (a === "" || b === "") return (a === "") - (b === "");
  const numbers = Number(a) - Number(b);
  return way * (Number.isNaN(numbers) ? a.localeCompare(b) : numbers);
}
