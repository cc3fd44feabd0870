package org.ondevice.app

import android.text.Spanned
import android.text.style.BackgroundColorSpan
import android.widget.EditText
import android.widget.TextView
import org.junit.Assert.assertEquals
import org.junit.Assert.assertTrue
import org.junit.Test
import java.io.File

class DataScreenTest : AppTest() {
    private fun ready() = app.jobs.words(DataScreen.PLACE) == null

    private fun trained(): List<String> = views(activity.window.decorView).filterIsInstance<TextView>().mapNotNull { it.text as? Spanned }
        .flatMap { text -> text.getSpans(0, text.length, BackgroundColorSpan::class.java).map { text.substring(text.getSpanStart(it), text.getSpanEnd(it)) } }

    @Test
    fun importsAFileAndMarksWhatIsLearned() {
        importModel()
        open(1)
        untilSaid("No data yet")
        shot("data-empty")
        pick(1, "reviews.jsonl", File(fixtures, "train.jsonl").readBytes())
        until("the preview") { ready() && "What is learned" in texts() }
        untilSaid("23 used of 23", "sst2")
        assertEquals(listOf(" terrible", " great", " terrible"), trained())
        shot("data-preview")
        rotate()
        until("the preview again") { ready() && "What is learned" in texts() }
    }

    /** A table whose columns are those of the model's own template, separated by semicolons. */
    @Test
    fun importsASemicolonTable() {
        open(1)
        val table = File(fixtures, "tickets.csv").readBytes()
        pick(1, "tickets.csv", table)
        until("the refusal") { app.jobs.error(DataScreen.PLACE) != null }
        untilSaid("Cannot tell the format of tickets.csv", "Body, Team, Note")
        importModel("tickets", File(fixtures, "tickets artifact"))
        pick(1, "tickets.csv", table)
        until("the preview") { ready() && "What is learned" in texts() }
        untilSaid("2 used of 2", "Billing 1", "Technical help 1")
        assertEquals(listOf("Billing", "Technical help"), trained())
        shot("data-table")
    }

    @Test
    fun refusesAFileWithoutRowsAndSaysWhy() {
        open(1)
        pick(1, "notes.txt", "hello\nworld\n".toByteArray())
        until("the refusal") { app.jobs.error(DataScreen.PLACE) != null }
        untilSaid("notes.txt", "Expected:")
        assertEquals(emptyList<File>(), app.store.dataFiles())
    }

    @Test
    fun namesTheRowsThatAreLeftOut() {
        importModel()
        open(1)
        pick(1, "mixed.jsonl", "{\"prompt\": \"2+2=\", \"completion\": \"4\"}\n{\"prompt\": 5}\n".toByteArray())
        until("the preview") { ready() && "What is learned" in texts() }
        untilSaid("1 row is left out:", "mixed.jsonl:2")
    }

    @Test
    fun writesEditsAndDeletesExamples() {
        importModel()
        open(1)
        click(R.id.write_example)
        find<EditText>(R.id.prompt).setText("Wie heißt meine Katze? 🐈")
        find<EditText>(R.id.answer).setText("Mimi")
        click(R.id.save)
        until("the preview") { ready() && "What is learned" in texts() }
        val stored = app.store.examples.read().single()
        assertEquals("Wie heißt meine Katze? 🐈" to " Mimi", stored.prompt to stored.completion)
        shot("data-examples")

        click("Edit example 1")
        find<EditText>(R.id.answer).setText("Luna")
        click(R.id.save)
        until("the change") { ready() }
        assertEquals(" Luna", app.store.examples.read().single().completion)

        click("Delete example 1")
        assertEquals("Delete example 1?", confirm())
        until("the deletion") { ready() }
        assertTrue(app.store.examples.read().isEmpty())
    }

    @Test
    fun anEmptyAnswerIsRefusedAndTheFormStays() {
        open(1)
        click(R.id.write_example)
        find<EditText>(R.id.prompt).setText("a question")
        click(R.id.save)
        untilSaid("'completion' is empty")
        assertEquals("a question", find<EditText>(R.id.prompt).text.toString())
    }

    @Test
    fun whatIsTypedSurvivesARotation() {
        open(1)
        click(R.id.write_example)
        find<EditText>(R.id.prompt).setText("half a thou")
        rotate()
        assertEquals("half a thou", find<EditText>(R.id.prompt).text.toString())
        shot("data-form-landscape")
    }
}
