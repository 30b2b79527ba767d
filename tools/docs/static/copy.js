// A button on each block of code. On a console block it copies the commands, without prompts and outputs.
const commandsOf = (text) => {
  const lines = text.split("\n").filter((line) => line.startsWith("$ "));
  return lines.map((line) => line.slice(2)).join("\n");
};

for (const block of document.querySelectorAll("div.highlight")) {
  const language = block.parentElement.className;
  const code = block.querySelector("pre");
  if (!code || language.includes("highlight-text")) continue;
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(language.includes("highlight-console") ? commandsOf(code.textContent) : code.textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  block.append(button);
}
