const gallery = document.getElementById("gallery");
const cards = [...gallery.children];
const sort = document.getElementById("gallery-sort"), words = document.getElementById("gallery-words");
const pair = document.getElementById("gallery-pair"), count = document.getElementById("gallery-count");
const picked = [];

const orders = {
  name: (a, b) => a.dataset.name.localeCompare(b.dataset.name),
  year: (a, b) => (b.dataset.year || "0").localeCompare(a.dataset.year || "0"),
  size: (a, b) => a.dataset.size - b.dataset.size,
  mechanism: (a, b) => a.dataset.mechanism.localeCompare(b.dataset.mechanism),
};

function show() {
  const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
  gallery.replaceChildren(...cards.toSorted((a, b) => orders[sort.value](a, b) || orders.name(a, b)));
  for (const card of cards) card.hidden = !wanted.every((word) => card.dataset.words.includes(word));
  count.textContent = `${cards.filter((card) => !card.hidden).length} models`;
}

function pick(name) {
  const at = picked.indexOf(name);
  if (at >= 0) picked.splice(at, 1);
  else picked.push(name);
  if (picked.length > 2) picked.shift();
  for (const button of gallery.querySelectorAll("button")) {
    button.setAttribute("aria-pressed", picked.includes(button.dataset.pick));
  }
  pair.hidden = picked.length === 0;
  pair.replaceChildren(...picked.map((chosen) => {
    const figure = document.createElement("figure"), image = document.createElement("img");
    const caption = document.createElement("figcaption"), page = document.createElement("a");
    image.src = `../pictures/${chosen}.svg`;
    image.alt = `The layers of ${chosen}`;
    page.href = `${chosen}.html`;
    page.textContent = chosen;
    caption.append(page);
    figure.append(caption, image);
    return figure;
  }));
  if (picked.length === 2) pair.scrollIntoView({ behavior: "smooth", block: "start" });
}

sort.addEventListener("change", show);
words.addEventListener("input", show);
gallery.addEventListener("click", (event) => {
  if (event.target.dataset.pick) pick(event.target.dataset.pick);
});
show();
