"""Reports on benchmark results: tables for a terminal and for Markdown, and one self-contained HTML page.

`files` reads and checks result files, `rows` asks one row; `text`, `claim`, `generators`, `losses`, `shares` and
`plots` say one thing each, and `page` puts them together.
"""
