// Tables of numbers can be sorted: a heading is a button, and a second click turns the order around.
(function () {
  "use strict";
  // The first number of a cell: "0.97 ± 0.05" counts as 0.97, "90.5%" as 90.5. Cells without one come last.
  function number(cell) {
    const found = cell.textContent.replace(/,/g, "").replace(/−/g, "-").match(/[-+]?\d*\.?\d+(e[-+]?\d+)?/i);
    return found ? Number(found[0]) : NaN;
  }
  function compare(a, b, sign) {
    const [x, y] = [number(a), number(b)];
    const [empty, other] = [a.textContent.trim() === "", b.textContent.trim() === ""];
    if (empty || other) return empty - other;
    if (!Number.isNaN(x) && !Number.isNaN(y) && x !== y) return sign * (x - y);
    return sign * a.textContent.localeCompare(b.textContent);
  }
  function sort(table, column) {
    const headings = [...table.tHead.rows[0].cells];
    const up = headings[column].getAttribute("aria-sort") !== "ascending";
    headings.forEach((h) => h.removeAttribute("aria-sort"));
    headings[column].setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = table.tBodies[0];
    [...body.rows]
      .sort((r, s) => compare(r.cells[column], s.cells[column], up ? 1 : -1))
      .forEach((row) => body.append(row));
  }
  const short = /^[-+−]?[\d.,]+ ?%?( (to|±) [\d.,]+ ?%?)?$/; // a number, "0.85 to 1.05" or "0.97 ± 0.05": never broken
  function prepare(table) {
    table.querySelectorAll("td").forEach((cell) => cell.classList.toggle("number", short.test(cell.textContent.trim())));
    if (!table.tHead || !table.tBodies.length || table.tBodies[0].rows.length < 4) return;
    const rows = [...table.tBodies[0].rows];
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      const numbers = rows.filter((row) => row.cells[column] && /^[-+−]?[\d.,]+/.test(row.cells[column].textContent.trim()));
      if (numbers.length < rows.length / 2 || !heading.textContent.trim()) return;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.title = "Sort by this column";
      button.append(...heading.childNodes);
      button.addEventListener("click", () => sort(table, column));
      heading.append(button);
    });
  }
  document.querySelectorAll(".md-typeset table:not([class])").forEach(prepare);
})();
