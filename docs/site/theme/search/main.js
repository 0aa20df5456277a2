// Search in the page itself. The search that comes with MkDocs reads its index through a worker and a request, which a
// browser refuses to a page that was opened from a disk; scripts it loads from anywhere.
(function () {
  "use strict";
  var input = document.getElementById("mkdocs-search-query");
  var output = document.getElementById("mkdocs-search-results");
  if (!input || !output) return;

  var places = {};
  var index = null;

  function load(path, then) {
    var script = document.createElement("script");
    script.src = base_url + "/" + path;
    script.onload = then;
    document.head.appendChild(script);
  }

  function build() {
    // Names such as `fedhb-niw` and `save_model` are found whole and by their parts.
    lunr.tokenizer.separator = /[\s\-_.,:;()[\]{}"'`=/|]+/;
    index = lunr(function () {
      this.ref("location");
      this.field("title", { boost: 10 });
      this.field("text");
      search_index.docs.forEach(function (place) {
        places[place.location] = place;
        this.add(place, { boost: place.location.startsWith("api/") ? 1 : 2 }); // prose comes before reference
      }, this);
    });
    answer();
  }

  function found(question) {
    return index.query(function (query) {
      lunr.tokenizer(question).forEach(function (token) {
        var word = token.toString();
        index.pipeline.runString(word).forEach(function (stem) { query.term(stem, { boost: 5 }); });
        query.term(word, { wildcard: lunr.Query.wildcard.TRAILING });
      });
    });
  }

  function answer() {
    if (!index) return;
    var question = input.value.trim();
    output.replaceChildren();
    if (question.length < 2) return;
    var results = found(question).slice(0, 50);
    if (!results.length) {
      output.textContent = "Nothing found.";
    }
    results.forEach(function (result) {
      var place = places[result.ref];
      var article = document.createElement("article");
      var heading = article.appendChild(document.createElement("h3"));
      var link = heading.appendChild(document.createElement("a"));
      link.href = base_url + "/" + place.location;
      link.textContent = place.title;
      var page = heading.appendChild(document.createElement("small"));
      page.textContent = " " + place.location.split("#")[0].replace(".html", "");
      var summary = article.appendChild(document.createElement("p"));
      summary.textContent = place.text.slice(0, 200);
      output.appendChild(article);
    });
  }

  var asked = new URLSearchParams(window.location.search).get("q");
  if (asked) input.value = asked;
  input.addEventListener("input", answer);
  load("search/lunr.js", function () { load("search/search_index.js", build); });
})();
