// The colours of curves and areas are the palette of Okabe & Ito 2008, "Color Universal Design", made to be told
// apart with every kind of colour vision; lines differ in their dashes as well. On dark ground the lines take the
// palette's lighter colours.

#include "snug/chart/style.h"

namespace snug::chart {

const std::string_view kPageMark = R"(<svg class="mark" viewBox="0 0 32 32" width="32" height="32" aria-hidden="true">
<rect x="1.5" y="1.5" width="29" height="29" rx="8" fill="none" stroke="currentColor" stroke-width="3"/>
<rect x="6.5" y="6.5" width="9" height="19" rx="2.5" fill="#0072b2"/>
<rect x="17" y="6.5" width="8.5" height="8.5" rx="2.5" fill="#e69f00"/>
<rect x="17" y="16.5" width="8.5" height="9" rx="2.5" fill="#009e73"/>
</svg>)";

const std::string_view kPageStyle = R"css(
:root {
  color-scheme: light dark;
  --page: #f5f3ee; --card: #ffffff; --ink: #1d2127; --soft: #59616b; --rule: #e7e3da; --grid: #ece9e2;
  --axis: #b9b4a9;
  --blue: #0072b2; --red: #d55e00; --green: #009e73; --violet: #a3568a;
  --s0: #1d2127; --s1: #d55e00; --s2: #0072b2; --s3: #009e73; --s4: #a3568a; --s5: #b07800; --s6: #3a8fc4; --s7: #6b7178;
  --shadow: 0 1px 2px #2b24101a, 0 4px 16px #2b24100d;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #121417; --card: #1b1e23; --ink: #e9e7e2; --soft: #a2a9b3; --rule: #2d3138; --grid: #292d34;
    --axis: #565d68;
    --blue: #56b4e9; --red: #e69f00; --green: #2fbf95; --violet: #cc79a7; --shadow: none;
    --s0: #e9e7e2; --s1: #e8803c; --s2: #56b4e9; --s3: #2fbf95; --s4: #cc79a7; --s5: #e6b800; --s6: #8fd0f5; --s7: #a2a9b3;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", sans-serif; }
header, main, footer { max-width: 1120px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 40px; padding-bottom: 24px; }
header .brand { display: flex; align-items: center; gap: 10px; color: var(--soft); font-weight: 600;
  letter-spacing: .02em; }
header .mark { width: 24px; height: 24px; }
h1 { margin: 14px 0 4px; font-size: 34px; line-height: 1.2; letter-spacing: -.02em; overflow-wrap: anywhere; }
h2 { margin: 44px 0 14px; font-size: 20px; letter-spacing: -.01em; }
h3 { margin: 0; font-size: 15px; font-weight: 650; }
header p { margin: 0; color: var(--soft); font-variant-numeric: tabular-nums; }
.cards, .charts { display: grid; gap: 16px; }
.cards { grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); margin-bottom: 16px; }
.charts { grid-template-columns: repeat(2, minmax(0, 1fr)); }
.card, .chart, .box { background: var(--card); border: 1px solid var(--rule); border-radius: 14px;
  box-shadow: var(--shadow); }
.card { padding: 16px 20px 14px; }
.card .label { color: var(--soft); font-size: 13px; }
.card .value { font-size: 30px; font-weight: 650; line-height: 1.25; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; }
.card .value small { font-size: 18px; font-weight: 550; letter-spacing: 0; color: var(--soft); }
.card .note { color: var(--soft); font-size: 13px; font-variant-numeric: tabular-nums; }
.chart { margin: 0; padding: 16px 24px 14px 20px; min-width: 0; }
.chart.wide { grid-column: 1 / -1; }
figcaption { display: flex; flex-wrap: wrap; align-items: baseline; gap: 2px 10px; min-height: 24px; }
.caption { color: var(--soft); font-size: 13px; }
.legend { flex-basis: 100%; min-height: 20px; display: flex; flex-wrap: wrap; gap: 2px 16px; color: var(--soft);
  font-size: 13px; }
.key { display: inline-flex; align-items: center; gap: 6px; white-space: nowrap; }
.plot { position: relative; margin: 28px 0 40px 50px; font-size: 12px; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.plot > svg { display: block; width: 100%; height: 190px; overflow: visible; border-bottom: 1px solid var(--axis); }
.wide .plot > svg { height: 300px; }
.y-ticks span { position: absolute; right: 100%; transform: translateY(50%); padding-right: 9px; line-height: 1;
  white-space: nowrap; }
.x-ticks { position: absolute; top: 100%; left: 0; right: 0; }
.x-ticks span { position: absolute; transform: translateX(-50%); padding-top: 8px; line-height: 1;
  white-space: nowrap; }
.x-ticks::after { content: attr(data-title); position: absolute; top: 25px; left: 0; right: 0; text-align: center;
  line-height: 1; }
.y-ticks { position: absolute; top: 0; bottom: 0; left: 0; }
.unit { position: absolute; right: 100%; bottom: 100%; padding: 0 9px 9px 0; line-height: 1; white-space: nowrap; }
path { fill: none; }
.grid { stroke: var(--grid); stroke-width: 1; vector-effect: non-scaling-stroke; }
.line, .dots, .marks { stroke: var(--hue); stroke-width: 2; stroke-linecap: round; stroke-linejoin: round;
  vector-effect: non-scaling-stroke; }
.line { stroke-dasharray: var(--dash, none); }
.dots { stroke-width: var(--size, 7); }
.marks { stroke-linecap: butt; }
.holes { stroke: var(--card); stroke-width: var(--hole, 0); stroke-opacity: var(--holed, 0); stroke-linecap: var(--cap, round);
  vector-effect: non-scaling-stroke; }
.series-0, .series-1, .series-2, .series-3, .series-4, .series-5, .series-6, .series-7 { --on: #fff; }
.series-0 { --hue: var(--s0); }
.series-1 { --hue: var(--s1); --dash: 8 5; --cap: square; }
.series-2 { --hue: var(--s2); --dash: 2 5; --hole: 4; --holed: 1; }
.series-3 { --hue: var(--s3); --dash: 10 4 2 4; --cap: square; --hole: 4; --holed: 1; }
.series-4 { --hue: var(--s4); --dash: 14 5; --size: 11; --hole: 6; --holed: 1; }
.series-5 { --hue: var(--s5); --dash: 5 5; --cap: square; --size: 10; --hole: 6; --holed: 1; }
.series-6 { --hue: var(--s6); --dash: 4 3 1 3; --size: 4; }
.series-7 { --hue: var(--s7); --dash: 1 4; --cap: square; --size: 4; }
.dots { stroke-linecap: var(--cap, round); }
.dots.small { stroke-width: 3.5; opacity: .55; }
.holes.small { display: none; }
.tag { position: absolute; color: color-mix(in srgb, var(--hue) 70%, var(--ink)); font-size: 12px; line-height: 1; white-space: nowrap;
  pointer-events: none; text-shadow: 0 0 3px var(--card), 0 0 3px var(--card), 0 0 3px var(--card); }
.y-title { position: absolute; left: 0; bottom: 100%; padding-bottom: 9px; line-height: 1; white-space: nowrap; margin-left: -42px; }
nav { display: flex; flex-wrap: wrap; gap: 4px 20px; }
nav a, .made a { color: var(--blue); }
.idea { max-width: 76ch; color: var(--soft); margin: 0 0 16px; }
.findings { max-width: 84ch; margin: 4px 0 20px; padding-left: 20px; }
.made { margin: 6px 0 2px; color: var(--soft); font-size: 12.5px; }
section .cards { grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); }
.bars { width: 100%; border-spacing: 0 7px; font-size: 13.5px; font-variant-numeric: tabular-nums; margin: 8px 0 6px; }
.bars th { font-weight: 400; text-align: left; padding-right: 14px; width: 1%; white-space: nowrap; }
.bars td { width: 1%; white-space: nowrap; text-align: right; padding-left: 12px; }
.bars .cells { width: auto; padding: 0; }
.bars .note { color: var(--soft); text-align: left; }
.bars svg { display: block; width: 100%; height: 20px; }
.scroll { overflow-x: auto; }
.numbers { border-spacing: 0; font-size: 13.5px; font-variant-numeric: tabular-nums; margin: 4px 0 6px; min-width: 60%; }
.numbers th, .numbers td { padding: 5px 18px 5px 0; border-top: 1px solid var(--rule); text-align: right; white-space: nowrap; }
.numbers th { font-weight: 400; }
.numbers th:first-child { text-align: left; }
.numbers thead th { color: var(--soft); border-top: 0; }
.area { fill: var(--hue); stroke: var(--card); stroke-width: .75; vector-effect: non-scaling-stroke; }
.faint .line, .line.faint { stroke-width: 1; opacity: .45; }
.key .faint .line { stroke-width: 1.5; opacity: .6; }
.training, .learning-rate { --hue: var(--blue); }
.validation { --hue: var(--red); --dash: 7 5; }
.gradient-norm { --hue: var(--violet); }
.loss-scale { --hue: var(--blue); }
.throughput { --hue: var(--green); }
.skipped { --hue: var(--red); }
.broken { --hue: var(--ink); }
.parameters { --hue: #0072b2; --on: #fff; }
.optimizer-state { --hue: #56b4e9; --on: #10202c; }
.gradients { --hue: #009e73; --on: #fff; }
.activations { --hue: #e69f00; --on: #2a1d00; }
.workspace { --hue: #cc79a7; --on: #24101b; }
.other { --hue: #999999; --on: #111; }
.inside { position: absolute; color: var(--on); font-size: 12px; line-height: 1; white-space: nowrap;
  pointer-events: none; }
.plot .inside { right: 10px; transform: translateY(50%); }
.bar .inside { line-height: 40px; padding: 0 6px; text-align: center; overflow: hidden; text-overflow: ellipsis; }
.cursor { position: absolute; top: 0; bottom: 0; width: 0; border-left: 1px solid var(--axis); pointer-events: none; }
.tip { position: absolute; top: 4px; left: 8px; padding: 7px 10px; white-space: pre; line-height: 1.45;
  color: var(--ink);
  background: var(--card); border: 1px solid var(--rule); border-radius: 8px; box-shadow: 0 4px 18px #0003;
  z-index: 1; }
.cursor.flip .tip { left: auto; right: 8px; }
.bar { position: relative; margin: 12px 0; height: 40px; }
.bar svg { position: absolute; display: block; width: 100%; height: 40px; border-radius: 8px; }
.shares { width: 100%; border-spacing: 0; font-variant-numeric: tabular-nums; }
.shares tbody { display: grid; grid-template-columns: repeat(auto-fill, minmax(290px, 1fr)); gap: 0 36px; }
.shares tr { display: grid; grid-template-columns: 1fr auto 62px; align-items: baseline; padding: 6px 0;
  border-top: 1px solid var(--rule); }
.shares th { font-weight: 400; text-align: left; }
.shares th svg { margin-right: 9px; border-radius: 3px; vertical-align: -1px; }
.shares td { text-align: right; }
.shares .share { color: var(--soft); }
.gradients-map { width: 100%; border-spacing: 0 2px; font-size: 13px; font-variant-numeric: tabular-nums; }
.gradients-map th { font-weight: 400; text-align: left; padding-right: 12px; white-space: nowrap; width: 1%; }
.gradients-map td { text-align: right; white-space: nowrap; width: 1%; padding-left: 12px; color: var(--soft); }
.gradients-map .cells { width: auto; padding: 0; }
.gradients-map svg { display: block; width: 100%; height: 14px; background: var(--grid); fill: var(--green); }
.fp16 { stroke: var(--red); stroke-width: 2; vector-effect: non-scaling-stroke; }
.fp16.scaled { stroke-dasharray: 3 3; }
.box .caption { margin: 0 0 12px; }
.box { padding: 20px 24px; }
pre.box { margin: 0; max-height: 560px; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4;
  font: 14px/1.6 ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 0 36px; margin: 0; }
dl div { display: flex; gap: 16px; justify-content: space-between; padding: 7px 0;
  border-bottom: 1px solid var(--rule); }
dt { color: var(--soft); overflow-wrap: anywhere; }
dd { margin: 0; text-align: right; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
summary { cursor: pointer; margin: 36px 0 12px; font-weight: 600; }
.events { border-spacing: 0; }
.events td { padding: 4px 24px 4px 0; vertical-align: top; overflow-wrap: anywhere;
  font-variant-numeric: tabular-nums; }
footer { padding-top: 36px; padding-bottom: 48px; color: var(--soft); font-size: 13px; }
@media print { .chart, .card, .box { break-inside: avoid; box-shadow: none; } pre.box { max-height: none; } }
)css";

const std::string_view kSmallScreenStyle = R"css(
@media (max-width: 760px) {
  header, main, footer { padding-left: 14px; padding-right: 14px; }
  h1 { font-size: 27px; }
  .charts { grid-template-columns: minmax(0, 1fr); }
  .cards { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 10px; }
  .card { padding: 12px 14px 10px; }
  .card .value { font-size: 23px; }
  .wide .plot > svg { height: 220px; }
  .bar .inside, .tag { display: none; }
  .bars .note { display: none; }
}
)css";

const std::string_view kPageScript = R"js(
for (const plot of document.querySelectorAll('.plot[data-hover]')) {
  const { places, texts } = JSON.parse(plot.dataset.hover);
  const cursor = plot.querySelector('.cursor');
  plot.addEventListener('pointermove', event => {
    const box = plot.getBoundingClientRect(), at = (event.clientX - box.left) / box.width;
    let nearest = -1;
    places.forEach((place, i) => {
      if (nearest < 0 || Math.abs(place - at) < Math.abs(places[nearest] - at)) nearest = i;
    });
    if (nearest < 0) return;
    cursor.hidden = false;
    cursor.style.left = places[nearest] * 100 + '%';
    cursor.classList.toggle('flip', places[nearest] > 0.5);
    cursor.firstElementChild.textContent = texts[nearest];
  });
  plot.addEventListener('pointerleave', () => { cursor.hidden = true; });
}
)js";

}  // namespace snug::chart
