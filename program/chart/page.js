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
