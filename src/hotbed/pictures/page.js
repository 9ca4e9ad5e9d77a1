// shows the values at the pointer; one listener, so that charts may be replaced
const hideTip = () => document.querySelectorAll(".tip, .cursor").forEach(node => { node.style.opacity = 0 });
document.addEventListener("mousemove", event => {
  const svg = event.target.closest("figure[data-chart] svg");
  if (!svg) return hideTip();
  const figure = svg.closest("figure"), tip = figure.querySelector(".tip"), cursor = figure.querySelector(".cursor");
  if (tip.style.opacity != 1) hideTip();
  const chart = JSON.parse(figure.dataset.chart);
  const number = value => value.toLocaleString(chart.language, {maximumSignificantDigits: 5});
  const show = value => chart.time ? new Date(value / 1000).toISOString().replace("T", " ").slice(0, chart.seconds ? 19 : 16) : (Math.abs(value) < 10 ? +value.toPrecision(3) : Math.round(value)).toLocaleString(chart.language);
  const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * chart.width;
  const x = chart.x0 + (at - chart.left) / (chart.right - chart.left) * (chart.x1 - chart.x0);
  const lines = [];
  let near = null;
  for (const series of chart.series) {
    let best = 0;
    series.x.forEach((value, i) => { if (Math.abs(value - x) < Math.abs(series.x[best] - x)) best = i });
    if (near === null || Math.abs(series.x[best] - x) < Math.abs(near - x)) near = series.x[best];
    const dot = document.createElement("i"), value = document.createElement("b");
    dot.style.color = series.color; dot.textContent = "●"; value.textContent = number(series.y[best]);
    lines.push(document.createElement("br"), dot, ` ${series.name}  `, value);
  }
  const place = chart.left + (near - chart.x0) / (chart.x1 - chart.x0 || 1) * (chart.right - chart.left);
  cursor.setAttribute("x1", place); cursor.setAttribute("x2", place); cursor.style.opacity = .6;
  tip.replaceChildren(`${chart.label} ${show(near)}`, ...lines);
  const left = place / chart.width * box.width + box.left - figure.getBoundingClientRect().left;
  tip.style.left = Math.min(left + 14, box.width - tip.offsetWidth) + "px";
  if (left + 14 > box.width - tip.offsetWidth) tip.style.left = Math.max(0, left - tip.offsetWidth - 14) + "px";
  tip.style.top = "52px"; tip.style.opacity = 1;
});
