// A button on each block of code. On a console block it copies the commands, without prompts and outputs.
const commandsOf = (text) => {
  const lines = text.split("\n").filter((line) => line.startsWith("$ "));
  return lines.map((line) => line.slice(2)).join("\n");
};

for (const block of document.querySelectorAll("div.highlight")) {
  const language = block.parentElement.className;
  const code = block.querySelector("pre");
  if (language.includes("highlight-text")) continue;
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const text = code.textContent;
    await navigator.clipboard.writeText(language.includes("highlight-console") ? commandsOf(text) : text);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  block.append(button);
}

// A keyboard scrolls only what it can focus.
function focusScrolled() {
  for (const box of document.querySelectorAll(".highlight pre, .table-wrapper")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}

focusScrolled();
addEventListener("resize", focusScrolled);
