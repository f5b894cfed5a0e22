"""The teaching guide: its tables and plans, made from the chapters and labs."""
