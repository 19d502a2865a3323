"use strict";
(function () {
  var data = JSON.parse(document.getElementById("data").textContent);
  function byId(id) { return document.getElementById(id); }
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
    var run = data.runs[name], part = element(dialog, "section");
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
        button.addEventListener("click", function () { open([run.parents[role]]); });
      });
    }
    if (Object.keys(run.config).length) {
      element(part, "p", "muted", "Configuration (non-default values):");
      facts(part, Object.keys(run.config).map(function (key) { return [key, run.config[key] === null ? "null" : run.config[key]]; }));
    }
    if (run.curve && run.curve.length > 1) curve(part, run.curve);
    var card = run.text || (data.runs[run.card] || {}).text;
    if (card) folded(part, "Data card" + (run.text ? "" : " of " + run.card), card);
    if (run.href) element(part, "a", "", "Files").href = run.href;
  }
  function open(names, place) {
    dialog.replaceChildren();
    var close = element(dialog, "button", "plain close", "close");
    close.type = "button";
    close.addEventListener("click", function () { dialog.close(); });
    if (place) {
      var read = element(dialog, "button", "plain", "Show answers");
      read.type = "button";
      read.addEventListener("click", function () { dialog.close(); choose(place); });
    }
    names.forEach(describe);
    if (!dialog.open) dialog.showModal();
    dialog.scrollTop = 0;
  }
  document.addEventListener("click", function (event) {
    var link = event.target.closest("a[data-runs]");
    if (!link) return;
    event.preventDefault();
    var cell = link.closest("td[data-place]");
    open(link.dataset.runs.split(" "), cell && JSON.parse(cell.dataset.place));
  });
  dialog.addEventListener("click", function (event) { if (event.target === dialog) dialog.close(); });

  // ------------------------------------------------------------------ answers
  var row = byId("choose-row"), other = byId("choose-other"), column = byId("choose-column"), language = byId("choose-language");
  var kind = byId("choose-kind"), list = byId("list"), told = byId("told");
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
  function choose(place) {
    row.value = place[0];
    show();
    column.value = place[1];
    kind.value = "all";
    show();
    byId("answers").scrollIntoView();
  }
  function block(parent, name, text) {
    element(parent, "pre", name, text === "" ? "(empty)" : text).dir = "auto";
  }
  function verdict(parent, item) {
    if (item[5] !== null) element(parent, "span", "verdict " + (item[5] ? "right" : "wrong"), item[5] ? "✓ right" : "✗ wrong");
    element(parent, "span", "", "extracted: " + (item[4] === "" ? "nothing" : item[4]));
    if (item[6]) element(parent, "span", "", item[6]);
  }
  function wanted(item, beside) {
    var mine = item[5] === true, theirs = beside && beside[5] === true, of = kind.value;
    if (of === "all") return true;
    if (!beside) return of === "right" ? mine : item[5] === false;
    return of === "differ" ? mine !== theirs : of === "first" ? mine && !theirs : of === "second" ? theirs && !mine : !mine && !theirs;
  }
  function show() {
    var all = data.cells.map(function (cell) { return cell.row; });
    fill(row, all);
    fill(column, cells(row.value, 1).map(function (cell) { return cell.column; }));
    fill(language, cells(row.value, 2).map(function (cell) { return cell.language; }));
    var rivals = all.filter(function (name) { return name !== row.value && cells(name, 3).length; });
    fill(other, [["", "nothing"]].concat(rivals.map(function (name) { return ["=" + name, name]; })));
    var cell = cells(row.value, 3)[0], rival = other.value && cells(other.value.slice(1), 3)[0];
    fill(kind, rival ? PAIR : ALONE);
    list.replaceChildren();
    if (!cell) { told.textContent = "No answers to show."; return; }
    var theirs = {};
    if (rival) rival.items.forEach(function (item) { theirs["=" + item[0]] = item; });
    var items = cell.items.filter(function (item) {
      var beside = theirs["=" + item[0]];
      return (!rival || beside) && wanted(item, beside);
    });
    told.textContent = cell.total ? items.length + " shown of " + cell.total + " questions" + (cell.at ? ", " + cell.at : "") + "." : "No samples were stored.";
    items.forEach(function (item) {
      var card = element(list, "article", "answer"), head = element(card, "header");
      element(head, "span", "", "Question " + item[0]);
      element(head, "span", "", "expected: " + data.strings[item[2]]);
      if (!rival) verdict(head, item);
      var prompt = data.strings[item[1]];
      if (prompt.length > 700) folded(card, "Prompt, " + prompt.length + " characters", prompt);
      else block(card, "prompt", prompt);
      if (!rival) { block(card, "reply", data.strings[item[3]]); return; }
      var pair = element(card, "div", "pair");
      [[cell, item], [rival, theirs["=" + item[0]]]].forEach(function (one) {
        var side = element(pair, "div"), above = element(side, "header");
        element(above, "b", "", one[0].row);
        verdict(above, one[1]);
        block(side, "reply", data.strings[one[1][3]]);
      });
    });
  }
  [row, other, column, language, kind].forEach(function (select) { select.addEventListener("change", show); });
  show();
})();
