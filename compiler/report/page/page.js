"use strict";

/* A moment in time: the slider, or the pointer over a chart, moves one line through all charts of a recurrence. */
for (const timeline of document.querySelectorAll(".timeline")) {
  const data = JSON.parse(document.getElementById(`${timeline.dataset.name}-data`).textContent);
  const moment = timeline.querySelector(".moment");
  const slider = moment.querySelector("input");
  const output = moment.querySelector("output");
  const show = (index) => {
    slider.value = index;
    slider.setAttribute("aria-valuetext", data.text[index]);
    output.textContent = data.text[index];
    timeline.style.setProperty("--cursor", `${data.at[index]}%`);
  };
  const indexAt = (place) => {
    let low = 0;
    let high = data.at.length - 1;
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (data.at[middle] <= place) low = middle;
      else high = middle - 1;
    }
    return low;
  };
  for (const area of timeline.querySelectorAll(".area")) {
    area.append(Object.assign(document.createElement("i"), { className: "cursor" }));
    area.addEventListener("pointermove", (event) => {
      const box = area.getBoundingClientRect();
      show(indexAt((100 * (event.clientX - box.left)) / box.width));
    });
  }
  slider.addEventListener("input", () => show(Number(slider.value)));
  moment.hidden = false;
  show(data.first);
}

/* A filter keeps the rows that have all of its words. */
for (const list of document.querySelectorAll(".list")) {
  const search = list.querySelector(".search");
  const input = search.querySelector("input");
  const output = search.querySelector("output");
  const rows = [...list.querySelectorAll("tbody tr")].map((row) => [row, row.textContent.toLowerCase()]);
  const filter = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const [row, text] of rows) {
      row.hidden = !words.every((word) => text.includes(word));
      count += row.hidden ? 0 : 1;
    }
    output.textContent = words.length ? `${count} of ${rows.length}` : "";
  };
  input.addEventListener("input", filter);
  search.hidden = false;
}
