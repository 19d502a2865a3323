"use strict";
(function () {
  function byId(id) { return document.getElementById(id); }
  var data = JSON.parse(byId("data").textContent), runs = JSON.parse(byId("runs-data").textContent);
  function element(parent, tag, name, text) {
    var made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;  // never as HTML
    return parent.appendChild(made);
  }

  // ------------------------------------------------------------------ columns, sorted within their groups
  document.querySelectorAll("table.sortable thead button").forEach(function (button) {
    button.addEventListener("click", function () {
      var head = button.closest("th"), table = button.closest("table");
      var place = Array.prototype.indexOf.call(head.parentNode.children, head);
      var down = head.getAttribute("aria-sort") !== "descending";
      table.querySelectorAll("th[aria-sort]").forEach(function (other) { other.removeAttribute("aria-sort"); });
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      function number(line) {
        var value = line.children[place] && line.children[place].dataset.value;
        return value ? Number(value) : (down ? -Infinity : Infinity);  // missing values come last
      }
      table.querySelectorAll("tbody").forEach(function (body) {
        var lines = Array.prototype.filter.call(body.children, function (line) { return !line.classList.contains("group"); });
        lines.sort(function (one, other) { return down ? number(other) - number(one) : number(one) - number(other); });
        lines.forEach(function (line) { body.appendChild(line); });
      });
    });
  });

  // ------------------------------------------------------------------ sections
  function unfold(address) {  // the section of a heading that a link leads to
    var heading = address.length > 1 && byId(address.slice(1));
    if (heading && heading.closest("summary")) heading.closest("details").open = true;
  }
  unfold(location.hash);

  // ------------------------------------------------------------------ runs
  var dialog = byId("dialog");
  function facts(parent, pairs) {
    var list = element(parent, "dl", "facts");
    pairs.forEach(function (pair) {
      if (pair[1] === "" || pair[1] === null || pair[1] === undefined) return;
      element(list, "dt", "", pair[0]);
      element(list, "dd", "", String(pair[1]));
    });
  }
  function folded(parent, title, text) {
    var more = element(parent, "details");
    element(more, "summary", "", title);
    element(more, "pre", "", text).dir = "auto";
  }
  function curve(parent, points) {
    var xs = points.map(function (p) { return p[0]; }), ys = points.map(function (p) { return p[1]; });
    var x0 = Math.min.apply(null, xs), x1 = Math.max.apply(null, xs), y0 = Math.min.apply(null, ys), y1 = Math.max.apply(null, ys);
    var space = "http://www.w3.org/2000/svg", svg = document.createElementNS(space, "svg"), line = document.createElementNS(space, "polyline");
    svg.setAttribute("viewBox", "0 0 100 100");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", "training loss over steps");
    line.setAttribute("points", points.map(function (p) {
      return (2 + 96 * (p[0] - x0) / (x1 - x0 || 1)).toFixed(2) + "," + (96 - 92 * (p[1] - y0) / (y1 - y0 || 1)).toFixed(2);
    }).join(" "));
    svg.appendChild(line);
    parent.appendChild(svg);
    element(parent, "p", "muted", "Loss " + ys[0] + " at step " + x0 + ", " + ys[ys.length - 1] + " at step " + x1 + ".");
  }
  function describe(name) {
    var run = runs[name], part = element(dialog, "section");
    element(part, "h3", "", name);
    if (!run) { element(part, "p", "muted", "Not a run of this table: it was created elsewhere."); return; }
    if (run.note) element(part, "p", "flag", run.note);
    facts(part, [["Stage", run.stage], ["Model", run.model], ["Time", run.time], ["Created", run.made], ["Attempt", run.attempt > 1 ? run.attempt : ""], ["Weights", run.root]]);
    if (Object.keys(run.parents).length) {
      var parents = element(part, "dl", "facts");
      Object.keys(run.parents).forEach(function (role) {
        element(parents, "dt", "", role);
        var button = element(element(parents, "dd"), "button", "plain", run.parents[role]);
        button.type = "button";
        button.addEventListener("click", function () { open(run.parents[role]); });
      });
    }
    if (Object.keys(run.config).length) {
      element(part, "p", "muted", "Configuration (non-default values):");
      facts(part, Object.keys(run.config).map(function (key) { return [key, run.config[key] === null ? "null" : run.config[key]]; }));
    }
    if (run.curve && run.curve.length > 1) curve(part, run.curve);
    var card = run.text || (runs[run.card] || {}).text;
    if (card) folded(part, "Data card" + (run.text ? "" : " of " + run.card), card);
    if (run.href) element(part, "a", "", "Files").href = run.href;
  }
  function open(name) {
    dialog.replaceChildren();
    var close = element(dialog, "button", "plain close", "close");
    close.type = "button";
    close.addEventListener("click", function () { dialog.close(); });
    describe(name);
    if (!dialog.open) dialog.showModal();
    dialog.scrollTop = 0;
  }
  document.addEventListener("click", function (event) {
    var link = event.target.closest("a[href^='#']"), target = link && link.getAttribute("href");
    if (!link) return;
    if (target.indexOf("#run-") === 0) open(decodeURIComponent(target.slice(5)));
    else if (link.dataset.language) choose(JSON.parse(link.closest("td").dataset.place), link.dataset.language);
    else return unfold(target);
    event.preventDefault();
  });
  dialog.addEventListener("click", function (event) { if (event.target === dialog) dialog.close(); });

  // ------------------------------------------------------------------ answers
  var row = byId("choose-row"), other = byId("choose-other"), column = byId("choose-column"), language = byId("choose-language");
  var kind = byId("choose-kind"), search = byId("search"), list = byId("list"), told = byId("told");
  var more = byId("more"), rest = byId("rest"), matches = [];  // each [[cell, item]], or two of them side by side
  var ALONE = [["all", "all"], ["right", "right"], ["wrong", "wrong"]];
  var PAIR = [["all", "all"], ["differ", "one right, the other wrong"], ["first", "only the first right"], ["second", "only the second right"], ["neither", "both wrong"]];

  function fill(select, values) {  // keeps the selection if it still exists
    var before = select.value, seen = {};
    select.replaceChildren();
    values.forEach(function (value) {
      var pair = Array.isArray(value) ? value : [value, value];
      if (!Object.prototype.hasOwnProperty.call(seen, pair[0])) select.add(new Option(pair[1], pair[0]));
      seen[pair[0]] = true;
    });
    if (Object.prototype.hasOwnProperty.call(seen, before)) select.value = before;
  }
  function cells(of, upTo) {
    return data.cells.filter(function (cell) {
      return cell.row === of && (upTo < 2 || cell.column === column.value) && (upTo < 3 || cell.language === language.value);
    });
  }
  function choose(place, spoken) {
    row.value = place[0];
    show();
    column.value = place[1];
    show();
    language.value = spoken;
    kind.value = "all";
    search.value = "";
    show();
    unfold("#answers");
    byId("answers").scrollIntoView();
  }
  function block(parent, name, text) {
    element(parent, "pre", name, text === "" ? "(empty)" : text).dir = "auto";
  }
  function verdict(parent, item) {
    var extracted = data.strings[item[5]], scores = data.strings[item[6]];
    if (item[1] !== null) element(parent, "span", "verdict " + (item[1] ? "right" : "wrong"), item[1] ? "✓ right" : "✗ wrong");
    element(parent, "span", "", "extracted: " + (extracted === "" ? "nothing" : extracted));
    if (scores) element(parent, "span", "", scores);
  }
  function wanted(item, beside) {
    var mine = item[1] === true, theirs = beside && beside[1] === true, of = kind.value;
    if (of === "all") return true;
    if (!beside) return of === "right" ? mine : item[1] === false;
    return of === "differ" ? mine !== theirs : of === "first" ? mine && !theirs : of === "second" ? theirs && !mine : !mine && !theirs;
  }
  function found(items) {  // whether the search is in a text of one of these answers
    var text = search.value.toLowerCase();
    return !text || items.some(function (item) {
      return item.slice(2).some(function (index) { return data.strings[index].toLowerCase().indexOf(text) >= 0; });
    });
  }
  function show() {
    var all = data.cells.map(function (cell) { return cell.row; });
    fill(row, all);
    fill(column, cells(row.value, 1).map(function (cell) { return cell.column; }));
    fill(language, cells(row.value, 2).map(function (cell) { return cell.language; }));
    language.parentNode.hidden = language.value === "all" && language.options.length === 1;  // logs of other tools
    var rivals = all.filter(function (name) { return name !== row.value && cells(name, 3).length; });
    fill(other, [["", "nothing"]].concat(rivals.map(function (name) { return ["=" + name, name]; })));
    var cell = cells(row.value, 3)[0], rival = other.value && cells(other.value.slice(1), 3)[0], theirs = {};
    fill(kind, rival ? PAIR : ALONE);
    list.replaceChildren();
    if (rival) data.answers[rival.answers].forEach(function (item) { theirs["=" + item[0]] = item; });
    var items = cell ? data.answers[cell.answers] : [];
    matches = [];
    items.forEach(function (item) {
      var beside = theirs["=" + item[0]];
      if (!rival && wanted(item) && found([item])) matches.push([[cell, item]]);
      if (beside && wanted(item, beside) && found([item, beside])) matches.push([[cell, item], [rival, beside]]);
    });
    if (!cell) told.textContent = "No answers to show.";
    else if (!cell.total) told.textContent = "No samples were stored.";
    else told.textContent = matches.length + " of " + items.length + " questions on this page" + (cell.total > items.length ? ", of " + cell.total + " in all" : "") + (cell.at ? "; " + cell.at : "") + ".";
    add(10);
  }
  function add(count) {  // further answers below the ones that are shown
    matches.slice(list.children.length, list.children.length + count).forEach(draw);
    var left = matches.length - list.children.length;
    more.textContent = "Show " + Math.min(10, left) + " more";
    rest.textContent = "Show all " + matches.length;
    more.hidden = left === 0;
    rest.hidden = left <= 10;
  }
  function draw(pair) {
    var item = pair[0][1], card = element(list, "article", "answer"), head = element(card, "header");
    element(head, "span", "", "Question " + item[0]);
    element(head, "span", "", "expected: " + data.strings[item[3]]);
    if (pair.length === 1) verdict(head, item);
    var prompt = data.strings[item[2]];
    if (prompt.length > 700) folded(card, "Prompt, " + prompt.length + " characters", prompt);
    else block(card, "prompt", prompt);
    if (pair.length === 1) { block(card, "reply", data.strings[item[4]]); return; }
    var sides = element(card, "div", "pair");
    pair.forEach(function (one) {
      var side = element(sides, "div"), above = element(side, "header");
      element(above, "b", "", one[0].row);
      verdict(above, one[1]);
      block(side, "reply", data.strings[one[1][4]]);
    });
  }
  if (!row) return;  // no answers
  [row, other, column, language, kind].forEach(function (select) { select.addEventListener("change", show); });
  search.addEventListener("input", show);
  more.addEventListener("click", function () { add(10); });
  rest.addEventListener("click", function () { add(matches.length); });
  show();
  if (language.parentNode.hidden && other.options.length === 2) {  // two models are shown side by side at once
    other.selectedIndex = 1;
    show();
  }
})();
