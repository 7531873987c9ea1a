//! `cargo xtask book`: the guides in `docs/` as a book, in `target/book`.
//!
//! mdBook as a library, because no registry has it as a program. It says nothing about pages that its table of contents leaves out, nor
//! about links that lead nowhere: both are errors here.

mod links;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use mdbook_driver::MDBook;
use mdbook_driver::book::BookItem;

fn main() -> Result<()> {
    // What mdBook warns of.
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_writer(std::io::stderr)
        .init();
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let docs = docs.canonicalize().context("docs/")?;
    let book = MDBook::load(&docs).context("docs/ is not a book")?;
    let listed: BTreeSet<PathBuf> = (book.iter())
        .filter_map(|item| match item {
            BookItem::Chapter(chapter) => chapter.path.clone(),
            _ => None,
        })
        .collect();
    let left_out: Vec<String> = (pages(&docs)?.difference(&listed))
        .map(|page| page.display().to_string())
        .collect();
    if !left_out.is_empty() {
        bail!("docs/SUMMARY.md leaves out {}", left_out.join(", "));
    }
    book.build().context("the book")?;
    let built = book.build_dir_for("html");
    let dead = links::dead(&built)?;
    if !dead.is_empty() {
        bail!("links that lead nowhere:\n{}", dead.join("\n"));
    }
    println!("{} pages: {}/index.html", listed.len(), built.display());
    Ok(())
}

/// Every page there is, as the table of contents names it.
fn pages(docs: &Path) -> Result<BTreeSet<PathBuf>> {
    let mut pages = BTreeSet::new();
    for file in links::files(docs, "md")? {
        let page = file.strip_prefix(docs)?.to_owned();
        if page != Path::new("SUMMARY.md") {
            pages.insert(page);
        }
    }
    Ok(pages)
}
