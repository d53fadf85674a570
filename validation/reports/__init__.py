"""Verdicts and timelines for people: tables, pages, pictures, JUnit."""
