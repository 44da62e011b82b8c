"use strict";
// Draws every figure of the page. When all are done, the body says how many were drawn and how
// many failed; nothing is fetched from anywhere.
(async () => {
  const options = {
    renderer: "svg",
    actions: { export: { svg: true, png: true }, source: false, compiled: false, editor: false },
  };
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  let drawn = 0;
  let errors = 0;
  for (const place of document.querySelectorAll("[data-figure]")) {
    try {
      await vegaEmbed(place, read("spec-" + place.dataset.figure), options);
      drawn += 1;
    } catch (error) {
      errors += 1;
      const note = document.createElement("p");
      note.className = "failure";
      note.textContent = "This figure could not be drawn: " + error;
      place.replaceChildren(note);
      console.error(error);
    }
  }
  document.body.dataset.figures = String(drawn);
  document.body.dataset.errors = String(errors);
})();
