"use strict";
(function () {
  function byId(id) { return document.getElementById(id); }
  document.querySelectorAll("table.sortable thead button").forEach(function (button) {  // missing values come last
    button.addEventListener("click", function () {
      var head = button.closest("th"), body = head.closest("table").tBodies[0], place = head.cellIndex;
      var sign = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
      head.parentNode.querySelectorAll("[aria-sort]").forEach(function (other) { other.removeAttribute("aria-sort"); });
      head.setAttribute("aria-sort", sign < 0 ? "descending" : "ascending");
      function number(row) { var value = row.cells[place].dataset.value; return value ? Number(value) : -sign * -Infinity; }
      function text(row) { return row.cells[place].textContent.trim(); }
      Array.from(body.rows).sort(function (a, b) {
        var x = number(a), y = number(b);
        return x === y ? text(a).localeCompare(text(b)) : sign * (x < y ? -1 : 1);
      }).forEach(function (row) { body.appendChild(row); });
    });
  });
  function unfold(address) {  // the section, and the row of a run, that a link leads to
    var target = address.length > 1 && byId(decodeURIComponent(address.slice(1))) || byId(address.slice(1));
    for (var at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    if (target && target.tagName === "TR") target.querySelectorAll("details").forEach(function (one) { one.open = true; });
  }
  unfold(location.hash);

  var model = byId("model"), other = byId("other"), grid, data;
  document.addEventListener("click", function (event) {
    var link = event.target.closest("a[href^='#']");
    if (!link) return;
    unfold(link.getAttribute("href"));
    if (link.dataset.model !== undefined && model) build().then(function () { model.value = link.dataset.model; show(link.dataset.column); });
  });
  if (!model) return;
  function escaped(value) { var box = document.createElement("p"); box.textContent = value; return box.innerHTML.replace(/"/g, "&quot;"); }
  function folded(prompt) {  // the question itself; what stands before it, as exemplars, is folded
    var at = prompt.trimEnd().lastIndexOf("\n\n");
    if (at < 0) return escaped(prompt);
    return escaped(prompt.slice(at + 2)) + "<details><summary>exemplars</summary>" + escaped(prompt.slice(0, at)) + "</details>";
  }
  function build() {  // when the section is first opened
    if (data) return data.ready;
    data = JSON.parse(byId("data").textContent);
    Object.keys(data.models).forEach(function (name) { model.add(new Option(name)); });
    var bundle = JSON.parse(byId("bundle").textContent), style = document.head.appendChild(document.createElement("style"));
    style.textContent = bundle.css;
    data.ready = import(URL.createObjectURL(new Blob([bundle.js], {type: "text/javascript"}))).then(function (library) {
      library.set_or_remove_dark_class();
      data.Table = library.default;
      show();
    });
    return data.ready;
  }
  function show(column) {  // one model's answers, beside another's to the same questions
    var rivals = Object.keys(data.models).filter(function (name) { return name !== model.value; }), before = other.value;
    other.replaceChildren(new Option("nothing", ""));
    rivals.forEach(function (name) { other.add(new Option(name, "=" + name)); });
    if (rivals.indexOf(before.slice(1)) >= 0) other.value = before;
    else if (rivals.length === 1) other.value = "=" + rivals[0];  // two models are side by side at once
    var theirs = {}, names = other.value ? [model.value, other.value.slice(1)] : [model.value];
    if (other.value) data.models[other.value.slice(1)].forEach(function (item) { theirs[item.slice(0, 3)] = item; });
    var lines = data.models[model.value].map(function (item) { return item.concat((theirs[item.slice(0, 3)] || []).slice(5)); });
    if (other.value) lines = lines.filter(function (line) { return line.length > 9; });
    function rank(line) { return data.strings[line[0]] === column ? 0 : 1; }
    lines.sort(function (a, b) { return rank(a) - rank(b); });  // those of the cell that was clicked come first
    var columns = [["Question", 2]];  // heads, and places in an item; a narrow window shows the first two columns
    names.forEach(function (name, at) {
      [["Response", 7], [name, 5], ["Extracted", 6], ["Scores", 8]].forEach(function (one) { columns.push([one[0], one[1] + 4 * at]); });
    });
    columns.push(["Expected", 4], ["Column", 0], ["Language", 1], ["Prompt", 3]);
    if (grid) grid.destroy();
    byId("list").replaceChildren();
    grid = new data.Table(byId("list"), {
      data: lines, order: [], pageLength: 10, lengthMenu: [10, 25, 100, {label: "All", value: -1}], autoWidth: false, deferRender: true,
      layout: {topStart: "info", topEnd: "search", bottomStart: "pageLength", bottomEnd: "paging"},
      columns: columns.map(function (one) {
        var at = one[1], few = at < 2 || at > 4 && at % 4 === 1;
        return {title: escaped(one[0]), data: at, columnControl: few ? ["order", ["searchList"]] : ["order", ["search"]],
          className: at > 4 && at % 4 === 3 || at === 3 ? "long" : "",
          render: function (value) { return at === 3 ? folded(data.strings[value]) : escaped(data.strings[value]); }};
      })
    });
  }
  model.addEventListener("change", function () { show(); });
  other.addEventListener("change", function () { show(); });
  byId("answers").closest("details").addEventListener("toggle", build);
  if (byId("answers").closest("details").open) build();
})();
