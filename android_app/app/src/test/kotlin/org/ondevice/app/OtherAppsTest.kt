package org.ondevice.app

import android.content.ContentProvider
import android.content.ContentValues
import android.content.Intent
import android.content.pm.ProviderInfo
import android.database.Cursor
import android.database.MatrixCursor
import android.net.Uri
import android.os.BadParcelableException
import android.os.Parcel
import android.os.Parcelable
import android.provider.DocumentsContract
import org.junit.After
import org.junit.Assert.assertEquals
import org.junit.Assert.assertFalse
import org.junit.Assert.assertNotNull
import org.junit.Assert.assertNull
import org.junit.Assert.assertTrue
import org.junit.Test
import org.robolectric.Robolectric
import org.robolectric.Shadows.shadowOf
import org.robolectric.annotation.Config
import java.io.ByteArrayInputStream
import java.io.File
import java.io.InputStream
import java.util.concurrent.CountDownLatch
import java.util.concurrent.atomic.AtomicInteger

/** What other apps can do to this one: by intents to its only exported component, and by providers that it reads. */
@Config(sdk = [26, 34], qualifiers = AppTest.PHONE)
class OtherAppsTest : AppTest() {
    private val released = CountDownLatch(1)
    private val round by lazy { File(File(fixtures, "fleet"), "round-0-0.odfleet").readBytes() }

    @After
    fun release() {
        released.countDown()
        until("the other apps' threads to end") { Foreign.SENT.availablePermits() == 4 && Foreign.PICKED.availablePermits() == 8 }
    }

    /** Calls that hang. A thread has its permit before it calls, and gives it back if it is cancelled in between. */
    private val hanging = AtomicInteger()

    /** As a call into another process: nothing here ends it. */
    private fun hang() {
        hanging.incrementAndGet()
        while (true) {
            try {
                return released.await()
            } catch (_: InterruptedException) {
                continue
            }
        }
    }

    /** A class that cannot be read, as one is that only the sender has. */
    class Alien : Parcelable {
        override fun describeContents() = 0

        override fun writeToParcel(out: Parcel, flags: Int) = out.writeInt(1)

        companion object {
            @JvmField val CREATOR = object : Parcelable.Creator<Alien> {
                override fun createFromParcel(from: Parcel): Alien = throw BadParcelableException("no such class here")

                override fun newArray(size: Int): Array<Alien?> = arrayOfNulls(size)
            }
        }
    }

    /** An intent as it comes from another process: its extras are bytes until they are read. */
    private fun Intent.sent(): Intent {
        val parcel = Parcel.obtain()
        writeToParcel(parcel, 0)
        parcel.setDataPosition(0)
        return Intent.CREATOR.createFromParcel(parcel).also { parcel.recycle() }
    }

    private fun start(intent: Intent) {
        controller = Robolectric.buildActivity(MainActivity::class.java, intent.setClass(app, MainActivity::class.java)).setup()
        settle()
    }

    @Test
    fun noIntentEndsTheApp() {
        val send = Intent(Intent.ACTION_SEND).setType("application/octet-stream")
        val hostile = listOf(
            Intent(send).putExtra(Intent.EXTRA_STREAM, Intent("a stream that is an intent")),
            Intent(send).putExtra(Intent.EXTRA_STREAM, "content://mail/1"),
            Intent(send).putExtra(Intent.EXTRA_STREAM, 7),
            Intent(send).putExtra(Intent.EXTRA_STREAM, arrayListOf(1, 2)),
            Intent(send).putExtra(Intent.EXTRA_STREAM, arrayOf<Parcelable>(Uri.parse("content://mail/1"))),
            Intent(send).putExtra(Intent.EXTRA_STREAM, Alien()),
            Intent(send).putExtra(Intent.EXTRA_STREAM, Uri.parse("file://${app.filesDir}/wanted.json")),
            Intent(send).putExtra(Intent.EXTRA_STREAM, Uri.parse("mailto:nobody")),
            Intent(send),
            Intent(Intent.ACTION_VIEW),
            Intent(Intent.ACTION_VIEW, Uri.parse("file://${app.filesDir}/wanted.json")),
            Intent(Intent.ACTION_VIEW, Uri.parse("CONTENT:")),
            Intent("an action that nobody knows").putExtra("alien", Alien()),
            Intent(Intent.ACTION_MAIN).putExtra(MainActivity.TAB, "two"),
            Intent(Intent.ACTION_MAIN).putExtra(MainActivity.TAB, Int.MIN_VALUE),
            Intent(Intent.ACTION_MAIN).putExtra(MainActivity.TAB, Alien()),
        )
        for (intent in hostile) {
            start(intent.sent())
            controller.newIntent(intent.sent())
            settle()
            assertNull("$intent", app.jobs.words(FleetScreen.PLACE))
            assertNull("$intent", app.rounds.offer)
            controller.pause().stop().destroy()
        }
    }

    @Test
    fun anAnswerOfThePickerIsOnlyReadFromAProvider() {
        open(1)
        activity.pick(Intent("pick"), 1)
        val private = Uri.fromFile(File(app.filesDir, "rows.jsonl").apply { writeText("{\"prompt\": \"a\", \"completion\": \"b\"}\n") })
        shadowOf(activity).receiveResult(Intent("pick"), android.app.Activity.RESULT_OK, Intent().setData(private))
        settle()
        assertNull(app.jobs.words(DataScreen.PLACE))
        assertEquals(emptyList<File>(), app.store.dataFiles())
    }

    /** A stream that gives its first [count] bytes, [everyMs] apart, and then nothing until the test ends. */
    private inner class Slow(private val count: Int, private val everyMs: Long = 0) : InputStream() {
        private var given = 0

        override fun read(): Int {
            if (given++ < count) return 'x'.code.also { Thread.sleep(everyMs) }
            hang()
            return -1
        }

        override fun read(into: ByteArray, offset: Int, length: Int): Int {
            val one = read()
            if (one < 0) return -1
            into[offset] = one.toByte()
            return 1
        }
    }

    private fun lends(uri: String, stream: () -> InputStream): Uri = Uri.parse(uri).also { shadowOf(app.contentResolver).registerInputStreamSupplier(it) { stream() } }

    private fun sends(uri: Uri): Intent = Intent(Intent.ACTION_SEND).putExtra(Intent.EXTRA_STREAM, uri).sent()

    /** Fails unless the app's one work thread is free. */
    private fun worksOn() {
        var done = false
        app.jobs.run("test", "other work", { }) { done = true }
        until("other work", 5) { done }
    }

    @Test
    fun aFileThatIsSentAndNeverArrivesHoldsUpNothing() {
        for ((name, stream) in listOf("open" to { hang(); Slow(0) }, "read" to { Slow(3) })) {
            app.foreignLimitMs = 1000
            start(sends(lends("content://mail/$name", stream)))
            assertNotNull(app.jobs.words(FleetScreen.PLACE))
            worksOn()
            untilSaid("does not answer")
            assertNull(app.jobs.words(FleetScreen.PLACE))
            controller.pause().stop().destroy()
        }
    }

    @Test
    fun aProviderThatHangsWhenItIsAskedForANameIsGivenUp() {
        register("hangs") { hang(); null }
        app.foreignLimitMs = 1000
        start(sends(Uri.parse("content://hangs/1")))
        worksOn()
        untilSaid("does not answer")
    }

    @Test
    fun theNewestFileIsRead() {
        app.foreignLimitMs = 60_000
        start(sends(lends("content://mail/blocked") { Slow(0) }))
        controller.newIntent(sends(lends("content://mail/round.odfleet") { ByteArrayInputStream(round) }))
        until("the round") { app.rounds.offer != null }
        assertNull(app.jobs.error(FleetScreen.PLACE))
    }

    @Test
    fun filesThatAreSentTakeOnlySoManyThreads() {
        app.foreignLimitMs = 60_000
        open(MainActivity.FLEET)
        for (number in 1..4) {
            controller.newIntent(sends(lends("content://mail/$number") { Slow(0) }))
            until("thread $number") { hanging.get() == number && Foreign.SENT.availablePermits() == 4 - number }
        }
        controller.newIntent(sends(lends("content://mail/5") { Slow(0) }))
        untilSaid("still owe this app an answer")
        activity.screen.onPicked(FleetScreen.FILE, lends("content://documents/round.odfleet") { ByteArrayInputStream(round) })
        until("the round that the user picked") { app.rounds.offer != null }
    }

    @Test
    fun aPickedFileThatDripsIsGivenUp() {
        app.foreignLimitMs = 1000
        open(1)
        activity.screen.onPicked(1, lends("content://documents/drips.jsonl") { Slow(1_000_000, 5) })
        untilSaid("does not answer")
        worksOn()
    }

    @Test
    fun aPickedFileThatDoesNotComeCanBeCancelled() {
        app.foreignLimitMs = 60_000
        open(1)
        activity.screen.onPicked(1, lends("content://documents/never.jsonl") { Slow(5000) })
        untilSaid("Importing")
        click(R.id.cancel)
        assertFalse("Importing" in texts())
        worksOn()
        assertNull(app.jobs.error(DataScreen.PLACE))
        assertEquals(emptyList<File>(), app.store.dataFiles())
        assertTrue(app.filesDir.walk().none { it.isFile && it.parentFile!!.name == "data" })
    }

    @Test
    fun aFolderThatHoldsItselfOrNeverEndsIsRefused() {
        val columns = arrayOf(DocumentsContract.Document.COLUMN_DOCUMENT_ID, DocumentsContract.Document.COLUMN_DISPLAY_NAME, DocumentsContract.Document.COLUMN_MIME_TYPE)
        register("itself") { MatrixCursor(columns).apply { addRow(arrayOf("root", "again", DocumentsContract.Document.MIME_TYPE_DIR)) } }
        register("endless") { MatrixCursor(columns).apply { repeat(5000) { addRow(arrayOf("$it", "$it", "text/plain")) } } }
        register("nameless") { MatrixCursor(columns).apply { addRow(arrayOf(null, null, null)) } }
        open(0)
        for ((authority, said) in listOf("itself" to "4 deep", "endless" to "1000 files", "nameless" to "without a name")) {
            activity.screen.onPicked(ModelsScreen.FOLDER, DocumentsContract.buildTreeDocumentUri(authority, "root"))
            until("the refusal of $authority") { app.jobs.words(ModelsScreen.PLACE) == null }
            untilSaid(said)
            worksOn()
        }
        assertEquals(emptyList<Any>(), app.store.models())
    }

    /** Another app's provider: [rows] is what any query gives. */
    private fun register(authority: String, rows: () -> Cursor?) {
        val provider = object : ContentProvider() {
            override fun onCreate() = true

            override fun query(uri: Uri, columns: Array<String>?, where: String?, values: Array<String>?, order: String?): Cursor? = rows()

            override fun getType(uri: Uri): String? = null

            override fun insert(uri: Uri, values: ContentValues?): Uri? = null

            override fun delete(uri: Uri, where: String?, arguments: Array<String>?) = 0

            override fun update(uri: Uri, values: ContentValues?, where: String?, arguments: Array<String>?) = 0
        }
        provider.attachInfo(app, ProviderInfo().apply { this.authority = authority })
        org.robolectric.shadows.ShadowContentResolver.registerProviderInternal(authority, provider)
    }
}
