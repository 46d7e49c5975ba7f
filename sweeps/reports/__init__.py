"""What a report is made of: run folders read, gate, statistics, table, figures, page, JSON."""
