"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  document.documentElement.classList.add("live");

  const element = (name, text, parent) => {
    const made = document.createElement(name);
    made.textContent = text;
    parent.append(made);
    return made;
  };

  // What a cell says of the tensors of its action.
  const tell = (cell) => {
    const [action, head, state, through, tensors] = data.cells[cell.dataset.k];
    const details = cell.closest("section").querySelector(".details");
    details.replaceChildren();
    for (const arrow of cell.closest(".grid").querySelectorAll(".arrows path[data-to]")) {
      arrow.classList.toggle("shown", arrow.dataset.to === cell.dataset.k);
    }
    element("h3", `${action}: ${data.said[state]}`, details);
    element("p", head + (through ? `: ${through}` : ""), details).className = "quiet";
    if (!tensors.length) return;
    const table = element("table", "", details), top = element("tr", "", element("thead", "", table));
    for (const name of ["tensor", "observed", "expected", "error", "rounding allows"]) element("th", name, top).scope = "col";
    const body = element("tbody", "", table);
    for (const one of tensors) {
      const row = element("tr", "", body);
      one.forEach((text, k) => element("td", text, row).className = k > 2 ? "n" : "");
    }
  };

  const choose = (cell, grid) => {
    const old = grid.querySelector('[tabindex="0"]');
    if (old) { old.tabIndex = -1; old.removeAttribute("aria-selected"); }
    cell.tabIndex = 0;
    cell.setAttribute("aria-selected", "true");
    tell(cell);
  };

  const column = (cell) => Number(cell.style.getPropertyValue("--t"));
  const nearest = (row, cell) => {
    const cells = [...row.querySelectorAll(".c")];
    return cells.reduce((best, one) => !best || Math.abs(column(one) - column(cell)) < Math.abs(column(best) - column(cell)) ? one : best, null);
  };
  const beside = (cell, step) => {
    for (let one = cell[step]; one; one = one[step]) if (one.classList.contains("c")) return one;
    return null;
  };
  const ways = {
    ArrowRight: (cell) => beside(cell, "nextElementSibling"),
    ArrowLeft: (cell) => beside(cell, "previousElementSibling"),
    ArrowDown: (cell) => { const row = cell.parentElement.nextElementSibling; return row && row.matches(".row") ? nearest(row, cell) : null; },
    ArrowUp: (cell) => { const row = cell.parentElement.previousElementSibling; return row && row.matches(".row") ? nearest(row, cell) : null; },
    Home: (cell) => cell.parentElement.querySelector(".c"),
    End: (cell) => cell.parentElement.lastElementChild,
  };

  for (const grid of document.querySelectorAll(".grid")) {
    const at = (event) => event.target.closest ? event.target.closest(".c") : null;
    let chosen = grid.querySelector(".c.culprit") || grid.querySelector(".c.wrong, .c.consequence") || grid.querySelector(".c");
    if (chosen) {
      choose(chosen, grid);
      grid.parentElement.scrollLeft = chosen.offsetLeft - grid.parentElement.clientWidth / 2;
    }
    grid.addEventListener("mouseover", (event) => { const cell = at(event); if (cell) tell(cell); });
    grid.addEventListener("mouseleave", () => { if (chosen) tell(chosen); });
    for (const name of ["focusin", "click"]) {
      grid.addEventListener(name, (event) => { const cell = at(event); if (cell && cell !== chosen) { chosen = cell; choose(cell, grid); } });
    }
    grid.addEventListener("keydown", (event) => {
      const cell = at(event), next = cell && ways[event.key] ? ways[event.key](cell) : null;
      if (!next) return;
      event.preventDefault();
      next.focus();
    });
  }

  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => {
      const source = button.previousElementSibling;
      try {
        await navigator.clipboard.writeText(source.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(source);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }

  for (const button of document.querySelectorAll("th button")) {
    button.addEventListener("click", () => {
      const head = button.parentElement, table = head.closest("table"), body = table.tBodies[0];
      const down = head.getAttribute("aria-sort") !== "descending";
      for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[head.cellIndex].dataset.v ?? row.cells[head.cellIndex].textContent;
      const rows = [...body.rows].sort((a, b) => {
        const [one, two] = [value(a), value(b)], apart = Number(one) - Number(two);
        const order = Number.isNaN(apart) ? one.localeCompare(two) : apart;
        return down ? -order : order;
      });
      body.append(...rows);
    });
  }
})();
