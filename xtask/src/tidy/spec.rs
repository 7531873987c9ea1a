//! The specification and the code hold each other up: every section of the transport's specification is cited by code that
//! implements it and by a test, and every citation names a section that is there.
//!
//! A citation is the page's name followed by its sections: `transport.md §5.1, §5.2`. Tests are what lies in a folder `tests` or a
//! file `tests.rs`, or in the simulator.

use std::collections::{BTreeMap, BTreeSet};

use super::files::Sources;

/// Pages whose citations must exist; the last one must also be implemented and tested throughout.
const PAGES: [&str; 2] = ["wire.md", COMPLETE];
const COMPLETE: &str = "transport.md";

/// Sections nobody implements or tests, and citations of sections that are not there.
pub fn check(sources: &Sources) -> Vec<String> {
    let mut violations = Vec::new();
    for page in PAGES {
        let place = format!("docs/spec/{page}");
        let Some(text) = sources.0.get(place.as_str()) else {
            violations.push(format!("{place} is missing"));
            continue;
        };
        let sections = sections(text);
        let mut cited: BTreeMap<bool, BTreeSet<String>> = BTreeMap::new();
        for (file, text) in sources.with_extension("", "rs") {
            if file.starts_with("xtask/") {
                continue; // this very file speaks of citations
            }
            for section in citations(text, page) {
                if !sections.contains(&section) {
                    violations.push(format!("{file}: {page} has no §{section}"));
                }
                cited.entry(is_test(file)).or_default().insert(section);
            }
        }
        if page != COMPLETE {
            continue;
        }
        for (test, what) in [(false, "implements"), (true, "tests")] {
            let cited = cited.get(&test).cloned().unwrap_or_default();
            for section in sections.iter().filter(|s| !is_divided(s, &sections)) {
                if !cited.contains(section) {
                    violations.push(format!("{place}: nobody {what} §{section}"));
                }
            }
        }
    }
    violations
}

/// The numbers of a page's headings.
fn sections(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter_map(|line| {
        let heading = line.trim_start_matches('#');
        (heading.len() < line.len()).then_some(heading.trim_start())
    });
    headings.filter_map(number).collect()
}

/// `§5.1 …`, `§5.1, …` → 5.1.
fn number(text: &str) -> Option<String> {
    let digits: String = text
        .strip_prefix('§')?
        .chars()
        .take_while(|c| c.is_ascii_digit() || *c == '.')
        .collect();
    let number = digits.trim_end_matches('.');
    (!number.is_empty()).then(|| number.to_owned())
}

/// Whether a section is only the roof of others.
fn is_divided(section: &str, all: &BTreeSet<String>) -> bool {
    let below = format!("{section}.");
    all.iter().any(|other| other.starts_with(&below))
}

/// Every section cited of a page: a list may follow the page's name, also over the end of a comment's line.
fn citations(text: &str, page: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices(page) {
        let mut rest = &text[at + page.len()..];
        loop {
            let next = rest.trim_start_matches(|c: char| c.is_whitespace() || "/!,".contains(c));
            let next = next.strip_prefix("and ").unwrap_or(next);
            let Some(section) = number(next) else {
                break;
            };
            rest = &next['§'.len_utf8() + section.len()..];
            found.push(section);
        }
    }
    found
}

fn is_test(file: &str) -> bool {
    file.starts_with("sim/") || file.ends_with("/tests.rs") || file.contains("/tests/")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: &str = "# Title\n## §1 One\n## §2 Two\n### §2.1 Sub\n```\n";

    fn sources(code: &str, test: &str) -> Sources {
        let file = |name: &str, text: &str| (name.to_owned(), text.to_owned());
        Sources(BTreeMap::from([
            file("docs/spec/transport.md", SPEC),
            file("docs/spec/wire.md", "## §1 Frame\n"),
            file("transport/src/a.rs", code),
            file("transport/tests/a.rs", test),
        ]))
    }

    #[test]
    fn both_sides_must_cite() {
        let all = "//! transport.md §1,\n//! §2.1 and more; wire.md §1.\n";
        assert_eq!(check(&sources(all, all)), Vec::<String>::new());
        assert_eq!(
            check(&sources("// transport.md §1", all)),
            ["docs/spec/transport.md: nobody implements §2.1"]
        );
        assert_eq!(
            check(&sources(all, "// transport.md §2.1, §3")),
            [
                "transport/tests/a.rs: transport.md has no §3",
                "docs/spec/transport.md: nobody tests §1"
            ]
        );
        assert_eq!(
            check(&sources(all, &format!("{all}// wire.md §7"))),
            ["transport/tests/a.rs: wire.md has no §7"]
        );
    }
}
