// The model of the first screen: lines of its spec change under the pointer, and when they are pressed.
const model = document.getElementById("model"), drawing = model.querySelector("img");
const lines = [...model.querySelectorAll("button")], descriptions = JSON.parse(model.dataset.descriptions);

function show(pointed) {
  const changed = lines.map((line) => (line.getAttribute("aria-pressed") === "true") !== (line === pointed));
  lines.forEach((line, index) => { line.textContent = changed[index] ? line.dataset.changed : line.dataset.initial; });
  const name = changed.map(Number).join("");
  drawing.src = `home/${name}.svg`;
  drawing.alt = descriptions[name];
}

for (const line of lines) {
  line.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") show(line); });
  line.addEventListener("pointerleave", () => show());
  line.addEventListener("click", () => {
    line.setAttribute("aria-pressed", line.getAttribute("aria-pressed") !== "true");
    show();
  });
}
