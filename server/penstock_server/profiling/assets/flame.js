// Draws the stacks of workers as a flame graph, the outermost frame on top. No library, and nothing from a network.
"use strict";
(() => {
  const ROW = 22, LEAST = 1.5; // pixels: the height of a row, and the least width of a frame that is drawn
  const data = JSON.parse(document.getElementById("profile-data").textContent);
  const $ = (id) => document.getElementById(id);
  const graph = $("graph"), says = $("says"), search = $("search"), reset = $("reset");
  let root = null, zoomed = null;

  const seconds = (us) => (us >= 1e6 ? (us / 1e6).toFixed(2) + " s" : (us / 1e3).toFixed(us >= 1e4 ? 0 : 1) + " ms");
  const percent = (part, all) => (all ? (100 * part / all).toFixed(part / all < 0.0995 ? 1 : 0) : "0") + " %";
  const place = ([name, file, line]) => (file ? name + "  " + file.split("/").pop() + ":" + (line || "?") : name);

  // The tree of the samples that are shown: `cpu` and `wait` are microseconds, with those of the children.
  function tree() {
    const made = { frame: -1, cpu: 0, wait: 0, children: new Map(), parent: null, depth: 0 };
    const which = $("worker").value, cpuToo = $("cpu").checked, waitToo = $("wait").checked, idleToo = $("idle").checked;
    data.workers.forEach((worker, number) => {
      if (which !== "all" && which !== String(number)) return;
      for (const [stack, onCpu, waiting] of worker.samples) {
        const frames = data.stacks[stack];
        if (!idleToo && data.frames[frames[0]][0] === data.idle) continue;
        const cpu = cpuToo ? onCpu : 0, wait = waitToo ? waiting : 0;
        if (!cpu && !wait) continue;
        let node = made;
        node.cpu += cpu; node.wait += wait;
        for (const frame of frames) {
          let below = node.children.get(frame);
          if (!below) {
            below = { frame, cpu: 0, wait: 0, children: new Map(), parent: node, depth: node.depth + 1 };
            node.children.set(frame, below);
          }
          below.cpu += cpu; below.wait += wait;
          node = below;
        }
      }
    });
    return made;
  }

  const total = (node) => node.cpu + node.wait;
  const sorted = (node) => [...node.children.values()].sort((a, b) => total(b) - total(a));

  function words(node) {
    const all = total(root), mine = total(node);
    const of = node.parent && node.parent !== root ? ", " + percent(mine, total(node.parent)) + " of its caller" : "";
    const cpu = ", " + percent(node.cpu, mine) + " of that on a CPU";
    if (node === root) return "all that is shown: " + seconds(all) + cpu;
    const [name, file, line] = data.frames[node.frame];
    return name + (file ? "  " + file + ":" + (line || "?") : "") + " — " + seconds(mine) + ", " + percent(mine, all) + of + cpu;
  }

  function matcher() {
    const text = search.value.trim().toLowerCase();
    if (!text) return null;
    return (node) => {
      const [name, file, line] = data.frames[node.frame];
      return (name + " " + file + ":" + line).toLowerCase().includes(text);
    };
  }

  // The time of the topmost frames that match: one below another is not counted twice.
  function matched(node, matches) {
    if (node !== root && matches(node)) return total(node);
    let sum = 0;
    for (const below of node.children.values()) sum += matched(below, matches);
    return sum;
  }

  function draw() {
    const width = graph.clientWidth, matches = matcher(), blocks = document.createDocumentFragment();
    let deepest = 0;
    function block(node, left, wide, above) {
      deepest = Math.max(deepest, node.depth);
      const button = document.createElement("button");
      button.type = "button";
      const known = node === root ? ["everything", "", 0, "penstock"] : data.frames[node.frame];
      button.className = known[3] + (above ? " above" : "") + (matches && node !== root && matches(node) ? " found" : "");
      button.style.left = left + "px";
      button.style.top = node.depth * ROW + "px";
      button.style.width = Math.max(1, wide - 1) + "px";
      if (wide > 26) button.textContent = place(known);
      button.setAttribute("aria-label", words(node));
      const cpu = document.createElement("i");
      cpu.style.width = (total(node) ? 100 * node.cpu / total(node) : 0) + "%";
      button.append(cpu);
      button.onclick = () => { zoomed = node; draw(); focusOn(node); };
      button.onmouseenter = button.onfocus = () => { says.textContent = words(node); };
      node.button = button;
      blocks.append(button);
    }
    function below(node, left, wide) {
      for (const child of sorted(node)) {
        const part = wide * total(child) / total(node);
        if (part < LEAST) break; // the others are smaller
        block(child, left, part, false);
        below(child, left, part);
        left += part;
      }
    }
    if (total(root)) {
      for (let node = zoomed.parent; node; node = node.parent) block(node, 0, width, true);
      block(zoomed, 0, width, false);
      below(zoomed, 0, width);
    }
    graph.replaceChildren(blocks);
    graph.style.height = (deepest + 1) * ROW + "px";
    reset.disabled = zoomed === root;
    $("found").textContent = matches ? percent(matched(root, matches), total(root)) + " of the time" : "";
    says.textContent = total(root) ? words(zoomed) : "Nothing to show: choose more above.";
  }

  const focusOn = (node) => node.button && node.button.focus({ preventScroll: true });
  function again() { root = tree(); zoomed = root; draw(); }

  for (const id of ["worker", "cpu", "wait", "idle"]) $(id).onchange = again;
  search.oninput = draw;
  reset.onclick = () => { zoomed = root; draw(); };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { search.value = ""; zoomed = root; draw(); }
    if (event.key === "/" && document.activeElement !== search) { event.preventDefault(); search.focus(); }
  });
  for (const button of document.querySelectorAll(".hot")) {
    button.onclick = () => { search.value = button.dataset.search; draw(); search.scrollIntoView({ block: "nearest" }); };
  }
  let wide = graph.clientWidth;
  new ResizeObserver(() => { if (graph.clientWidth !== wide) { wide = graph.clientWidth; draw(); } }).observe(graph);
  again();
})();
