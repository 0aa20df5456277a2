"use strict";
// Draws the figures and makes the table of clients sort and filter. Colours of axes and text are the page's own
// ("currentColor"), so that light, dark and print need no second drawing.
(() => {
  const text = { labelColor: "currentColor", titleColor: "currentColor" };
  const axis = { ...text, domainColor: "currentColor", tickColor: "currentColor", gridColor: "currentColor" };
  const font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif";
  const config = {
    background: null,
    font,
    axis: { ...axis, gridOpacity: 0.14, domainOpacity: 0.5, tickOpacity: 0.5, titleFontWeight: "normal", labelFontSize: 11, labelFlush: false },
    legend: { ...text, labelLimit: 320, symbolStrokeWidth: 2, symbolOpacity: 1, columns: 3 },
    title: { color: "currentColor" },
    view: { stroke: null },
    mark: { invalid: "filter" },
  };
  const options = {
    renderer: "svg",
    mode: "vega-lite",
    config,
    actions: { export: true, source: false, compiled: false, editor: false },
    tooltip: { theme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light" },
  };

  async function draw() {
    const specs = JSON.parse(document.getElementById("specs").textContent);
    let drawn = 0;
    for (const [name, spec] of Object.entries(specs)) {
      const place = document.getElementById(`plot-${name}`);
      try {
        await vegaEmbed(place, spec, options);
        // The words for who cannot see the figure go from its place to the drawing, beside which there is a menu now.
        const drawing = place.querySelector("svg.marks");
        drawing.setAttribute("role", "img");
        drawing.setAttribute("aria-label", place.getAttribute("aria-label"));
        place.removeAttribute("role");
        place.removeAttribute("aria-label");
        drawn += 1;
      } catch (error) {
        console.error(name, error);
        place.innerHTML = "<p class='failed'></p>";
        place.firstChild.textContent = `This figure could not be drawn: ${error.message}`;
      }
    }
    document.documentElement.dataset.drawn = `${drawn} of ${Object.keys(specs).length}`;
  }

  // Numbers sort as numbers and text as text with 2 before 10; what is not known stays at the end either way.
  function value(row, column) {
    const cell = row.cells[column];
    if (cell.classList.contains("number")) {
      return cell.dataset.value === undefined ? null : Number(cell.dataset.value);
    }
    return cell.textContent;
  }

  function compare(one, other) {
    return typeof one === "number" ? one - other : one.localeCompare(other, undefined, { numeric: true });
  }

  function sort(table, column, direction) {
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => ({ row, value: value(row, column) }));
    rows.sort((a, b) => {
      if (a.value === null || b.value === null) {
        return (a.value === null) - (b.value === null);
      }
      return direction * compare(a.value, b.value);
    });
    body.append(...rows.map(({ row }) => row));
    [...table.tHead.rows[0].cells].forEach((head, place) => {
      if (place === column) {
        head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      } else {
        head.removeAttribute("aria-sort");
      }
    });
  }

  function sortable(table) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      button.addEventListener("click", () => {
        sort(table, column, head.getAttribute("aria-sort") === "ascending" ? -1 : 1);
      });
      head.replaceChildren(button);
    });
  }

  function filterable(table, form) {
    const client = form.querySelector("#filter-client");
    const run = form.querySelector("#filter-run");
    const narrow = () => {
      const words = client.value.trim().toLowerCase();
      const rows = [...table.tBodies[0].rows];
      for (const row of rows) {
        const named = row.cells[0].textContent.toLowerCase().includes(words);
        const chosen = !run || !run.value || row.cells[1].textContent === run.value;
        row.hidden = !(named && chosen);
      }
      const shown = rows.filter((row) => !row.hidden).length;
      form.querySelector("#filter-count").textContent = `${shown} of ${rows.length} rows`;
    };
    form.addEventListener("input", narrow);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.hidden = false;
  }

  // A printed page cannot be unfolded.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("main details:not([open])")].filter((one) => !one.closest(".plot"));
    folded.forEach((one) => { one.open = true; });
  });
  addEventListener("afterprint", () => folded.forEach((one) => { one.open = false; }));

  const table = document.getElementById("clients-table");
  if (table) {
    sortable(table);
    filterable(table, document.getElementById("filter"));
  }
  draw();
})();
