const gallery = document.getElementById("gallery");
const cards = [...gallery.children];
const sort = document.getElementById("gallery-sort"), words = document.getElementById("gallery-words");
const dialog = document.getElementById("gallery-pair"), count = document.getElementById("gallery-count");
const note = document.getElementById("gallery-note");
let picked = [];

const orders = {
  name: (a, b) => a.dataset.name.localeCompare(b.dataset.name),
  year: (a, b) => (b.dataset.year || "0").localeCompare(a.dataset.year || "0"),
  size: (a, b) => (Number(a.dataset.size) || Infinity) - (Number(b.dataset.size) || Infinity),
  mechanism: (a, b) => a.dataset.mechanism.localeCompare(b.dataset.mechanism),
};

function show() {
  const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
  gallery.replaceChildren(...cards.toSorted((a, b) => orders[sort.value](a, b) || orders.name(a, b)));
  for (const card of cards) card.hidden = !wanted.every((word) => card.dataset.words.includes(word));
  count.textContent = `${cards.filter((card) => !card.hidden).length} models`;
}

function pick(name) {
  picked = picked.includes(name) ? picked.filter((other) => other !== name) : [...picked, name];
  for (const button of gallery.querySelectorAll("button")) {
    button.setAttribute("aria-pressed", picked.includes(button.dataset.pick));
  }
  note.hidden = picked.length !== 1;
  note.textContent = `${picked[0]} is chosen. Choose a second model.`;
  if (picked.length < 2) return;
  document.getElementById("gallery-diff").textContent = `tfkit diff ${picked.join(" ")}`;
  dialog.querySelector(".pair").replaceChildren(...picked.map(figure));
  dialog.showModal();
}

function figure(name) {
  const figure = document.createElement("figure"), image = document.createElement("img");
  const caption = document.createElement("figcaption"), page = document.createElement("a");
  image.src = `../pictures/${name}.svg`;
  image.alt = `The layers of ${name}`;
  page.href = `${name}.html`;
  page.textContent = name;
  caption.append(page);
  figure.append(caption, image);
  return figure;
}

sort.addEventListener("change", show);
words.addEventListener("input", show);
gallery.addEventListener("click", (event) => {
  if (event.target.dataset.pick) pick(event.target.dataset.pick);
});
dialog.addEventListener("close", () => {
  for (const name of picked) pick(name);
});
show();
