//! Links between the pages of a built book: does each lead to a file that is there, and to a place in it?

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Pages that mdBook makes of others: their links are those others'.
const MADE: [&str; 3] = ["print.html", "404.html", "toc.html"];

/// The links of the pages in `book` that lead nowhere, each with its page.
pub fn dead(book: &Path) -> Result<Vec<String>> {
    let mut pages = BTreeMap::new();
    for file in files(book, "html")? {
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        pages.insert(file, text);
    }
    let places: BTreeMap<&PathBuf, BTreeSet<String>> = (pages.iter())
        .map(|(page, text)| (page, attributes(text, "id").collect()))
        .collect();
    let mut dead = Vec::new();
    for (page, text) in &pages {
        let name = page.strip_prefix(book)?;
        if MADE.iter().any(|made| name == Path::new(made)) {
            continue;
        }
        for link in attributes(text, "href").collect::<BTreeSet<_>>() {
            if link.contains(':') || link.starts_with("//") {
                continue;
            }
            let (path, place) = link.split_once('#').unwrap_or((&link, ""));
            let file = match path {
                "" => page.clone(),
                path => normal(&page.parent().unwrap_or(book).join(path)),
            };
            let there = match places.get(&file) {
                Some(places) => place.is_empty() || places.contains(place),
                None => file.exists(),
            };
            if !there {
                dead.push(format!("{}: {link}", name.display()));
            }
        }
    }
    Ok(dead)
}

/// Every file below a directory with this extension.
pub fn files(directory: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut left = vec![directory.to_owned()];
    while let Some(directory) = left.pop() {
        let entries = fs::read_dir(&directory).with_context(|| directory.display().to_string())?;
        for entry in entries {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                left.push(entry.path());
            } else if entry.path().extension().is_some_and(|e| e == extension) {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The values of an attribute, as mdBook writes it.
fn attributes<'t>(text: &'t str, name: &'t str) -> impl Iterator<Item = String> + 't {
    let begin = format!(" {name}=\"");
    let mut rest = text;
    std::iter::from_fn(move || {
        let (_, after) = rest.split_once(&begin)?;
        let (value, after) = after.split_once('"')?;
        rest = after;
        Some(value.replace("&amp;", "&"))
    })
}

/// Without `..`, as a browser resolves it.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            std::path::Component::ParentDir => {
                normal.pop();
            }
            std::path::Component::CurDir => {}
            other => normal.push(other),
        }
    }
    normal
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_followed_to_their_place() {
        let book = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let file = book.path().join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        write("a.html", r#"<h2 id="one">1</h2>"#);
        let links = r##"<h1 id="here">x</h1> <a href="../a.html#one">1</a> <a href="../a.html#two">2</a> <a href="#here">h</a>
            <a href="b.html">b</a> <a href="https://example.invalid/">far</a> <a href="../picture.png">p</a>"##;
        write("in/c.html", links);
        write("picture.png", "");
        let dead = dead(book.path()).unwrap();
        assert_eq!(dead, ["in/c.html: ../a.html#two", "in/c.html: b.html"]);
    }
}
