
/* The page as one PNG. What the browser has laid out is painted again on a canvas: boxes, lines, words and charts.
   Nothing is loaded, so this works from a file and without a network. */
const picture = (() => {
  const LEFT_OUT = "button, fieldset, .skip, .moment, .search, .cursor, script";
  const MARKS = { disc: "\u2022", "disclosure-closed": "\u25b8", "disclosure-open": "\u25be" };
  const PIXELS = 1.6e7; // Safari paints no larger canvas
  const SIDE = 16000;
  const WIDEST = 1440;

  const dashes = (style, width) => (style === "dotted" ? [width, width] : style === "dashed" ? [3 * width, width] : []);

  const rounded = (pen, box, radius, inset = 0) => {
    const [wide, high] = [box.width - 2 * inset, box.height - 2 * inset];
    pen.beginPath();
    pen.roundRect(box.left + inset, box.top + inset, wide, high, Math.min(radius, wide / 2, high / 2));
  };

  /* Background and borders; a border all around follows the corners. */
  const boxOf = (pen, style, box) => {
    const radius = style.borderRadius.endsWith("%") ? box.height / 2 : parseFloat(style.borderRadius) || 0;
    rounded(pen, box, radius);
    pen.fillStyle = style.backgroundColor;
    pen.fill();
    const sides = ["Top", "Right", "Bottom", "Left"].map((side) => ({
      width: style[`border${side}Style`] === "none" ? 0 : parseFloat(style[`border${side}Width`]),
      style: style[`border${side}Style`],
      colour: style[`border${side}Color`],
    }));
    if (sides.every((side) => side.width > 0)) {
      rounded(pen, box, radius, sides[0].width / 2);
      pen.lineWidth = sides[0].width;
      pen.strokeStyle = sides[0].colour;
      pen.stroke();
      return;
    }
    const { left, right, top, bottom } = box;
    const [up, across, down, along] = sides.map((side) => side.width / 2);
    const lines = [
      [left, top + up, right, top + up],
      [right - across, top, right - across, bottom],
      [left, bottom - down, right, bottom - down],
      [left + along, top, left + along, bottom],
    ];
    lines.forEach(([x0, y0, x1, y1], index) => {
      if (!sides[index].width) return;
      pen.lineWidth = sides[index].width;
      pen.strokeStyle = sides[index].colour;
      pen.setLineDash(dashes(sides[index].style, sides[index].width));
      pen.stroke(new Path2D(`M${x0} ${y0}L${x1} ${y1}`));
      pen.setLineDash([]);
    });
  };

  const pens = (pen, style) => {
    pen.font = `${style.fontStyle} ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
    pen.fillStyle = style.color;
    if ("letterSpacing" in pen) pen.letterSpacing = style.letterSpacing === "normal" ? "0px" : style.letterSpacing;
  };

  /* Text on a line that fills a box. */
  const textIn = (pen, text, box) => {
    const size = pen.measureText(text);
    const high = size.fontBoundingBoxAscent + size.fontBoundingBoxDescent;
    pen.fillText(text, box.left, box.top + (box.height - high) / 2 + size.fontBoundingBoxAscent);
  };

  /* A text word by word, or letter by letter where a word is broken over lines. */
  const wordsOf = (pen, node) => {
    const range = document.createRange();
    const boxes = (start, end) => {
      range.setStart(node, start);
      range.setEnd(node, end);
      return [...range.getClientRects()].filter((box) => box.width > 0);
    };
    for (const word of node.data.matchAll(/\S+/g)) {
      const found = boxes(word.index, word.index + word[0].length);
      if (found.length === 1) textIn(pen, word[0], found[0]);
      for (let at = 0; found.length > 1 && at < word[0].length; at += 1) {
        const [box] = boxes(word.index + at, word.index + at + 1);
        if (box) textIn(pen, word[0][at], box);
      }
    }
  };

  /* The paths of a chart, whose strokes keep their width however it is stretched. */
  const chartOf = (pen, svg) => {
    const box = svg.getBoundingClientRect();
    const seen = svg.viewBox.baseVal;
    const place = new DOMMatrix([box.width / seen.width, 0, 0, box.height / seen.height, box.left, box.top]);
    for (const path of svg.querySelectorAll("path")) {
      const style = getComputedStyle(path);
      const drawn = new Path2D();
      drawn.addPath(new Path2D(path.getAttribute("d")), place);
      pen.save();
      pen.globalAlpha *= Number(style.opacity);
      if (style.fill !== "none") {
        pen.fillStyle = style.fill;
        pen.fill(drawn);
      }
      if (style.stroke !== "none") {
        pen.strokeStyle = style.stroke;
        pen.lineWidth = parseFloat(style.strokeWidth);
        pen.lineCap = style.strokeLinecap;
        pen.lineJoin = style.strokeLinejoin;
        pen.setLineDash(style.strokeDasharray === "none" ? [] : style.strokeDasharray.split(",").map(parseFloat));
        pen.stroke(drawn);
      }
      pen.restore();
    }
  };

  const markOf = (pen, node, style, box) => {
    const mark = style.display === "list-item" && MARKS[style.listStyleType];
    if (!mark) return;
    const left = box.left - (style.listStylePosition === "inside" ? 0 : 16);
    textIn(pen, mark, { left, top: box.top, height: parseFloat(style.lineHeight) || box.height });
  };

  const paint = (pen, node) => {
    if (node.matches(LEFT_OUT) || !node.checkVisibility()) return;
    const style = getComputedStyle(node);
    const box = node.getBoundingClientRect();
    pen.save();
    pen.globalAlpha *= Number(style.opacity);
    if (node !== document.body) boxOf(pen, style, box);
    if (style.overflowX !== "visible") {
      rounded(pen, box, parseFloat(style.borderRadius) || 0);
      pen.clip();
    }
    pens(pen, style);
    markOf(pen, node, style, box);
    for (const child of node.childNodes) {
      if (child.nodeType === Node.TEXT_NODE) {
        pens(pen, style);
        wordsOf(pen, child);
      } else if (child.localName === "svg") chartOf(pen, child);
      else if (child.nodeType === Node.ELEMENT_NODE) paint(pen, child);
    }
    pen.restore();
  };

  /* By how much tables are wider than the page: on a phone they scroll, and a picture cannot. */
  const cut = () => {
    const tables = [...document.querySelectorAll(".scroll")].filter((node) => node.checkVisibility());
    return Math.max(0, ...tables.map((node) => node.scrollWidth - node.clientWidth));
  };

  const drawn = () => {
    const root = document.documentElement.getBoundingClientRect();
    const [wide, high] = [Math.max(root.width, document.documentElement.scrollWidth), root.height];
    const scale = Math.min(2, Math.sqrt(PIXELS / (wide * high)), SIDE / high);
    const canvas = document.createElement("canvas");
    canvas.width = Math.floor(wide * scale);
    canvas.height = Math.floor(high * scale);
    const pen = canvas.getContext("2d");
    pen.fillStyle = getComputedStyle(document.body).backgroundColor;
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.scale(scale, scale);
    pen.translate(-root.left, -root.top);
    paint(pen, document.body);
    return canvas.toDataURL("image/png");
  };

  return () => {
    const body = document.body;
    body.style.minWidth = `${Math.min(body.clientWidth + cut(), WIDEST)}px`;
    try {
      return drawn();
    } finally {
      body.style.minWidth = "";
    }
  };
})();

const save = document.getElementById("picture");
save.addEventListener("click", () => {
  const link = Object.assign(document.createElement("a"), { href: picture(), download: "reroll.png" });
  link.click();
});
save.hidden = false;
